"""A provisioned federation on this machine whose processes can be killed: mTLS, three sites, their supervisors."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from flare_sparse.flare.site.setup import allow_classes

ROOT = Path(__file__).resolve().parents[3]
SITES = ("site-1", "site-2", "site-3")
SERVER, ADMIN = "localhost", "lead@coordination.org"
SHARED_STORE = "/tmp/nvflare"
PARENTS = {SERVER: "server_train", **dict.fromkeys(SITES, "client_train")}
JOBS = {SERVER: "runner_process", **dict.fromkeys(SITES, "worker_process")}
UNUSED_MODULES = ("transformers", "scipy", "skimage", "matplotlib", "sklearn", "onnx", "PIL")
"""Optional imports of MONAI that no job here needs; without them a process starts in 2 s of processor time, not 5."""
SHORTER = 9
"""Factor by which the drops shorten FLARE's timeouts: 40 s here stand for 6 minutes."""
TIMEOUTS = {"GET_TASK_TIMEOUT": 300, "SUBMIT_TASK_RESULT_TIMEOUT": 300, "DEAD_CLIENT_GRACE_PERIOD": 60}
"""FLARE's timeouts in seconds that are shorter than 6 minutes, by the name of their variable."""


class Unexpected(Exception):
    """The federation did not reach the state that the experiment needs."""


def wait_for(condition: Callable[[], Any], seconds: float, what: str, every: float = 0.1) -> Any:
    """Return the value of ``condition`` once it is true.

    Raises:
        Unexpected: the condition is not true in time.
    """
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise Unexpected(f"not within {seconds:.0f} s: {what}")
        time.sleep(every)
    return value


class Federation:
    """Processes, kits and sessions of one provisioned project.

    Args:
        folder: receives kits, data and faults.
        ports: the server's ports for sites and for admins.
        detours: port of localhost at which a site reaches the server instead of the server's own, by site.
        has_short_timeouts: divide ``TIMEOUTS`` by ``SHORTER``.
    """

    def __init__(
        self,
        folder: Path,
        ports: tuple[int, int],
        detours: Mapping[str, int] | None = None,
        *,
        has_short_timeouts: bool = False,
    ):
        self.folder, self.ports, self.detours = folder, ports, dict(detours or {})
        self.has_short_timeouts = has_short_timeouts
        self._session: Session | None = None
        self.faults = folder / "faults"
        self.kits = folder / "workspace" / "sparse" / "prod_00"
        hooks = Path(__file__).parent / "hooks"
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(hooks), os.environ.get("PYTHONPATH", "")]),
            "FLARE_SPARSE_FAULTS": str(self.faults),
            "FLARE_SPARSE_UNUSED": ",".join(UNUSED_MODULES),
            "OMP_NUM_THREADS": "1",
        }
        if has_short_timeouts:
            self.environment |= {f"NVFLARE_{name}": str(seconds / SHORTER) for name, seconds in TIMEOUTS.items()}
        # Compiling the package in each of a job's processes takes longer than its rounds.
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def _run(self, *line: str) -> None:
        done = subprocess.run(line, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unexpected(f"{' '.join(line)}: {done.stdout}{done.stderr}")

    def prepare(self) -> None:
        """Provision kits, write the allow-lists and a small cohort for each site."""
        self.faults.mkdir(parents=True, exist_ok=True)
        if self.kits.is_dir():
            return
        project = (ROOT / "poc" / "project.yml").read_text()
        for old, new in zip((8102, 8103), self.ports, strict=True):
            project = project.replace(str(old), str(new))
        for site, port in self.detours.items():
            plain = f"name: {site}, type: client"
            project = project.replace(plain, f"{plain}, connect_to: {{host: localhost, port: {port}}}")
        (self.folder / "project.yml").write_text(project)
        self._run("nvflare", "provision", "-p", str(self.folder / "project.yml"), "-w", str(self.folder / "workspace"))
        for kit in PARENTS:
            allow_classes(self.kits / kit)
        self._separate_job_store()
        self._shorten_waits()
        for number, site in enumerate(SITES, start=1):
            rows = [f"{i},{(i * number) % 7 % 2},{i % 2},{i % 3 % 2},{i % 5 % 2}" for i in range(60)]
            data = self.folder / f"{site}.csv"
            data.write_text("stay,died,med_a,med_b,med_c\n" + "\n".join(rows) + "\n")
            (self.kits / site / "local" / "flare_sparse.yaml").write_text(f"data: {data}\n")

    def _separate_job_store(self) -> None:
        """Give the server its own job store: servers that share FLARE's default would run each other's jobs."""
        resources = self.kits / SERVER / "local" / "resources.json"
        text = resources.read_text()
        if SHARED_STORE not in text:
            raise Unexpected(f"{resources}: names no {SHARED_STORE}; where does this server keep its jobs?")
        resources.write_text(text.replace(SHARED_STORE, str(self.folder / "store")))

    def _shorten_waits(self) -> None:
        """Let supervisors look for their process, and clients report to the server, more often than by default."""
        for name in PARENTS:
            script = self.kits / name / "startup" / "sub_start.sh"
            text = script.read_text()
            # FLARE's own intervals, 5 s and 10 s, would be most of the time of a cell.
            text = text.replace("\n  sleep 5\n", "\n  sleep 1\n")
            if name != SERVER:
                text = text.replace("--set secure_train=true", "--set secure_train=true heart_beat_interval=2")
            script.write_text(text)

    def clear_checkpoints(self) -> None:
        """Delete the checkpoints of server and sites: a cell that broke off must not decide the next one."""
        for name in PARENTS:
            shutil.rmtree(self.kits / name / "checkpoints", ignore_errors=True)

    def start(self) -> None:
        """Start every participant that is not running by its ``start.sh``."""
        for name, module in PARENTS.items():
            if not self.list_processes(name, module):
                kit = self.kits / name
                (kit / "daemon_pid.fl").unlink(missing_ok=True)
                with (kit / "process.log").open("a") as log:
                    subprocess.run(
                        [str(kit / "startup" / "start.sh")],
                        cwd=kit,
                        env=self.environment,
                        stdout=log,
                        stderr=log,
                        check=True,
                    )
            if name == SERVER:
                wait_for(lambda: self.list_processes(SERVER, "server_train"), 120, "a server process")
                self.get_session(300)

    def stop(self) -> None:
        """Stop all processes; a supervisor that finds ``shutdown.fl`` does not restart its child."""
        self.close_session()
        for name in PARENTS:
            (self.kits / name / "shutdown.fl").touch()
        for process in self.list_all_processes():
            process.kill()
        wait_for(lambda: not self.list_all_processes(), 60, "everything stopped")
        for name in PARENTS:
            (self.kits / name / "shutdown.fl").unlink(missing_ok=True)

    def list_all_processes(self) -> list[psutil.Process]:
        return [psutil.Process(pid) for pid, _ in self._iterate_commands()]

    def _iterate_commands(self) -> Iterator[tuple[int, list[str]]]:
        """Yield number and command line of each process of this federation."""
        # From /proc at once: psutil's objects for every process of the machine take longer than the wait between polls.
        kits = str(self.kits)
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            # A process may end meanwhile. The command line of a zombie is empty.
            with suppress(OSError):
                line = file.read_bytes().decode(errors="replace")
                if kits in line:
                    yield int(file.parent.name), line.split("\0")

    def list_processes(self, name: str, module: str) -> list[psutil.Process]:
        """Return a participant's processes that run ``module``: its parent process, or its job processes."""
        return self._find_processes({name: module})

    def _find_processes(self, modules: Mapping[str, str]) -> list[psutil.Process]:
        """Return the processes that run the module of their participant."""
        kits = {str(self.kits / name): module for name, module in modules.items()}
        found = []
        for pid, words in self._iterate_commands():
            kit = next((word for word in words if word in kits), None)
            if kit is not None and any(kits[kit] in word for word in words):
                with suppress(psutil.Error):
                    found.append(psutil.Process(pid))
        return found

    def list_job_processes(self) -> list[psutil.Process]:
        return self._find_processes(JOBS)

    def kill(self, processes: list[psutil.Process], how: int = signal.SIGKILL) -> None:
        """Send a signal to all processes at once; return when they have ended."""
        for process in processes:
            process.send_signal(how)
        psutil.wait_procs(processes, timeout=20)
        if alive := [p.pid for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
            raise Unexpected(f"still running after a kill: {alive}")

    def get_session(self, seconds: float = 60) -> Session:
        """Return the lead's session; log in, as soon as the server accepts it, unless the session still works."""

        def login() -> Session | None:
            try:
                return new_secure_session(ADMIN, str(self.kits / ADMIN), timeout=5)
            except Exception:  # noqa: BLE001 - FLARE raises several kinds while the server starts
                return None

        if self._session is not None:
            try:
                self._session.get_system_info()
            except Exception:  # noqa: BLE001 - the server was restarted, or the session ended
                self.close_session()
        if self._session is None:
            self._session = wait_for(login, seconds, "a login", every=0.5)
        return self._session

    def close_session(self) -> None:
        """Log out; a server that was killed cannot be told."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(Exception):
                session.close()

    def is_connected(self) -> bool:
        """Return whether the server lists every site."""
        clients = self.get_session().get_system_info().client_info
        return {client.name for client in clients} == set(SITES)

    def get_record(self, job: str) -> Path:
        """Return the folder to which the server's job process writes a run's record."""
        return self.kits / SERVER / job / "app_server" / "flare_sparse"
