"""Run the fast tests on every interpreter that is there: nox, or nox --python 3.12."""

import nox

nox.options.error_on_missing_interpreters = False


@nox.session(python=["3.11", "3.12", "3.13"])
def tests(session: nox.Session) -> None:
    """Install the package with the pinned dependencies, and run the tests that take two minutes."""
    session.install("-c", "constraints.txt", ".[test]")
    session.run("pytest", "-m", "not slow and not long", *session.posargs)
