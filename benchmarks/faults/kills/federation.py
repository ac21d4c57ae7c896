"""A provisioned federation on this machine whose processes can be killed: mTLS, three sites, their supervisors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

ROOT = Path(__file__).resolve().parents[3]
SITES = ("site-1", "site-2", "site-3")
SERVER, ADMIN = "localhost", "lead@coordination.org"
SHARED_STORE = "/tmp/nvflare"
PARENTS = {SERVER: "server_train", **dict.fromkeys(SITES, "client_train")}
JOBS = {SERVER: "runner_process", **dict.fromkeys(SITES, "worker_process")}


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
    """

    def __init__(self, folder: Path, ports: tuple[int, int], detours: Mapping[str, int] | None = None):
        self.folder, self.ports, self.detours = folder, ports, dict(detours or {})
        self.faults = folder / "faults"
        self.kits = folder / "workspace" / "sparse" / "prod_00"
        hooks = Path(__file__).parent / "hooks"
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(hooks), os.environ.get("PYTHONPATH", "")]),
            "FLARE_SPARSE_FAULTS": str(self.faults),
            "OMP_NUM_THREADS": "1",
        }

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
            self._run("flare-sparse", "site", "allow", str(self.kits / kit))
        self._separate_job_store()
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
                with self.session(300):
                    pass

    def stop(self) -> None:
        """Stop all processes; a supervisor that finds ``shutdown.fl`` does not restart its child."""
        for name in PARENTS:
            (self.kits / name / "shutdown.fl").touch()
        for process in self.list_all_processes():
            process.kill()
        wait_for(lambda: not self.list_all_processes(), 60, "everything stopped")
        for name in PARENTS:
            (self.kits / name / "shutdown.fl").unlink(missing_ok=True)

    def list_all_processes(self) -> list[psutil.Process]:
        return [
            process
            for process in psutil.process_iter()
            if any(str(self.kits) in word for word in _read_command(process))
        ]

    def list_processes(self, name: str, module: str) -> list[psutil.Process]:
        """Return a participant's processes that run ``module``: its parent process, or its job processes."""
        kit = str(self.kits / name)
        return [
            p
            for p in self.list_all_processes()
            if kit in _read_command(p) and any(module in word for word in _read_command(p))
        ]

    def list_job_processes(self) -> list[psutil.Process]:
        return [process for name, module in JOBS.items() for process in self.list_processes(name, module)]

    def kill(self, processes: list[psutil.Process], how: int = signal.SIGKILL) -> None:
        """Send a signal to all processes at once; return when they have ended."""
        for process in processes:
            process.send_signal(how)
        psutil.wait_procs(processes, timeout=20)
        if alive := [p.pid for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
            raise Unexpected(f"still running after a kill: {alive}")

    @contextmanager
    def session(self, seconds: float = 20) -> Iterator[Session]:
        """Yield a session of the lead, as soon as the server accepts a login."""

        def login() -> Session | None:
            try:
                return new_secure_session(ADMIN, str(self.kits / ADMIN), timeout=5)
            except Exception:  # noqa: BLE001 - FLARE raises several kinds while the server starts
                return None

        session = wait_for(login, seconds, "a login", every=1)
        try:
            yield session
        finally:
            session.close()

    def is_connected(self) -> bool:
        with self.session(300) as session:
            return {client.name for client in session.get_system_info().client_info} == set(SITES)

    def get_record(self, job: str) -> Path:
        """Return the folder to which the server's job process writes a run's record."""
        return self.kits / SERVER / job / "app_server" / "flare_sparse"


def _read_command(process: psutil.Process) -> list[str]:
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.Error:
        return []
