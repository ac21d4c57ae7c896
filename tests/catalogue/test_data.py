"""Bad input, section 4: what a site's own data can be. Through the site's FLARE components and back, FOBS included."""

from __future__ import annotations

import gzip
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import yaml
from nvflare.apis.client import Client
from nvflare.apis.fl_constant import ReturnCode, ServerCommandKey
from nvflare.apis.fl_context import FLContextManager
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs

from flare_sparse.assemble import assemble
from flare_sparse.config import parse_job
from flare_sparse.data.phantom import write_phantoms
from flare_sparse.endpoints.server import ServerEndpoint
from flare_sparse.federation import Federation, Outcome, RoundRules
from flare_sparse.flare.checkpoints import CHECKPOINTS_VARIABLE
from flare_sparse.flare.executor import SparseExecutor
from flare_sparse.flare.filters import DecodeRequest, DecodeUpdate, EncodeUpdate
from flare_sparse.flare.payload import REPLY, TASK, message_to_shareable
from flare_sparse.flare.session import ServerSession, SiteSession
from flare_sparse.params import compute_digest
from flare_sparse.wire.ledger import Ledger

SHAPE = (12, 16, 12)
SITES, OTHERS, HOSTILE = ["site-1", "site-2", "site-3"], ["site-1", "site-3"], "site-2"
CANARY = "CANARY7f3a"
"""Stands in the folder of the second site and in its subjects' names; nothing that leaves it may show it."""

Damage = Callable[[Path], None]


class Hospital:
    """One site: FLARE's filters and executor around its data, and what they leave on its disk."""

    def __init__(self, folder: Path, name: str, job: dict[str, Any], data: Path, subset: list[str] | None):
        for part in ("local", "run", "config"):
            (folder / part).mkdir(parents=True)
        said = {"data": str(data), "subset": subset}
        (folder / "local" / "flare_sparse.yaml").write_text(yaml.safe_dump(said))
        (folder / "config" / "flare_sparse.yaml").write_text(yaml.safe_dump(job))
        workspace = SimpleNamespace(
            get_site_config_dir=lambda: str(folder / "local"),
            get_run_dir=lambda job: str(folder / "run"),
            get_app_config_dir=lambda job: str(folder / "config"),
            get_root_dir=lambda: str(folder),
        )
        parts = {"site": SiteSession()}
        engine = SimpleNamespace(
            get_component=parts.get, get_workspace=lambda: workspace, fire_event=lambda *event: None
        )
        self.fl_ctx = FLContextManager(engine=engine, identity_name=name, job_id="job").new_context()
        self.folder, self.executor = folder, SparseExecutor()

    def sends(self, message: np.ndarray) -> bytes:
        """What FLARE would put on the line."""
        data = DecodeRequest().process(message_to_shareable(message, {}), self.fl_ctx)
        reply = self.executor.execute(TASK, data, self.fl_ctx, Signal())
        try:
            reply = EncodeUpdate().process(reply, self.fl_ctx)
        except Exception:  # noqa: BLE001 - as FLARE does
            reply = make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR)
        sent: bytes = fobs.dumps(reply)
        return sent

    @property
    def error(self) -> str:
        file = self.folder / "run" / "site_error.txt"
        return file.read_text() if file.is_file() else ""


class Hospitals:
    """Three sites with brains of their own; the second one's can be damaged."""

    def __init__(self, folder: Path, brains: Path, task: str = "brain_age"):
        self.folder, self.brains, self.task, self.runs = folder, brains, task, 0
        self.damaged = Path(shutil.copytree(brains, folder / CANARY))
        self.subjects = sorted(path.name for path in self.damaged.glob(f"sub-{CANARY}*"))
        self.subset: list[str] | None = self.subjects
        self.left: list[bytes] = []

    def file(self, number: int) -> Path:
        """The volume of one of the second site's subjects."""
        name = self.subjects[number]
        return self.damaged / name / "anat" / f"{name}_T1w.nii.gz"

    def run(self, sites: list[str] = SITES) -> Outcome:
        """FedAvg over two rounds."""
        self.runs += 1
        network = {"name": "brain_age_cnn_3mm", "channels": [2, 2], "reduced": 2}
        task = {"name": self.task, "shape": list(SHAPE), "spacing": [3, 3, 3], "downsample": 2, "model": network}
        method = {"name": "fedavg", "rounds": 2, "training": {"epochs": 1, "lr": 0.01}}
        job = {"name": "data", "seed": 1, "method": method, "task": task}
        assembly = assemble(parse_job(job))
        session = ServerSession()
        session.endpoint = ServerEndpoint(assembly.layout, assembly.run_id, "float32", Ledger())
        engine = SimpleNamespace(get_component=lambda name: session, fire_event=lambda *event: None)
        server = FLContextManager(engine=engine, identity_name="server", job_id="job").new_context()
        self.hospitals = {name: self._hospital(name, job) for name in sites}

        def carry(question: Any) -> dict[str, Any]:
            replies = {}
            for name, message in question.messages.items():
                sent = self.hospitals[name].sends(message)
                self.left.append(sent)
                result: Shareable = fobs.loads(sent)
                result.set_header(ServerCommandKey.FL_CLIENT, Client(name, "token"))
                replies[name] = DecodeUpdate().process(result, server)[REPLY]
            return replies

        rules = RoundRules(quarantine_after=0)
        federation = Federation(assembly.method, session.endpoint, assembly.task.metric, rules)
        return federation.run(assembly.weights, lambda: sites, carry)

    def _hospital(self, name: str, job: dict[str, Any]) -> Hospital:
        folder = self.folder / f"run-{self.runs}" / name
        if name == HOSTILE:
            return Hospital(folder, name, job, self.damaged, self.subset)
        number = int(name[-1])
        return Hospital(folder, name, job, self.brains, [f"sub-0{number}00{i}" for i in range(1, 4)])

    def refuses(self, *damages: tuple[str, Damage]) -> str:
        """Each damage to a subject of its own: found, named at the site, and only a code leaves it.

        Returns what the site is told.
        """
        for number, (_, damage) in enumerate(damages):
            damage(self.file(number))
        outcome = self.run()
        assert all(record.rejected == {HOSTILE: "E_DATA"} for record in outcome.rounds)
        assert all(record.sites_contributed == OTHERS and record.is_balanced for record in outcome.rounds)
        said = self.hospitals[HOSTILE].error
        for number, (finding, _) in enumerate(damages):
            assert f"{self.subjects[number]}: {finding}" in said.replace(self.file(number).name, "FILE"), said
        assert not any(CANARY.encode() in sent for sent in self.left)
        assert compute_digest(outcome.weights) == compute_digest(self.run(OTHERS).weights)
        return said


@pytest.fixture(scope="module")
def brains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three subjects of sites 1 and 3, four of the second, whose names are to be kept secret."""
    path = write_phantoms(tmp_path_factory.mktemp("brains") / "p", sites=3, subjects=4, seed=0, shape=SHAPE)
    table = path / "participants.tsv"
    table.write_text(table.read_text().replace("sub-0200", f"sub-{CANARY}"))
    for folder in path.glob("sub-0200*"):
        (volume,) = folder.glob("anat/*")
        volume.rename(volume.with_name(volume.name.replace("sub-0200", f"sub-{CANARY}")))
        folder.rename(path / folder.name.replace("sub-0200", f"sub-{CANARY}"))
    return path


@pytest.fixture
def hospitals(tmp_path: Path, brains: Path, monkeypatch: pytest.MonkeyPatch) -> Hospitals:
    monkeypatch.setenv(CHECKPOINTS_VARIABLE, "off")
    flare_decomposers.register()  # what FLARE itself registers in every process, and nothing of a job
    common_decomposers.register()
    return Hospitals(tmp_path, brains)


def flipped(share: float) -> Damage:
    def damage(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[int(share * len(data))] ^= 16
        file.write_bytes(data)

    return damage


def cut(length: int) -> Damage:
    return lambda file: file.write_bytes(file.read_bytes()[:length]) and None


def volume(voxels: np.ndarray, affine: np.ndarray | None = None) -> Damage:
    def damage(file: Path) -> None:
        image = nib.Nifti1Image(voxels, None)
        image.header.set_sform(np.diag([3.0, 3.0, 3.0, 1.0]) if affine is None else affine, code=2)
        nib.save(image, file)

    return damage


def header(field: str, value: Any) -> Damage:
    def damage(file: Path) -> None:
        data = gzip.decompress(file.read_bytes())
        said = nib.Nifti1Header(data[:348])
        said[field] = value
        file.write_bytes(gzip.compress(said.binaryblock + data[348:]))

    return damage


def bomb(file: Path) -> None:
    data = gzip.decompress(file.read_bytes())
    with gzip.open(file, "wb", compresslevel=1) as stream:
        stream.write(data)
        for _ in range(64):
            stream.write(bytes(2**20))


VOXELS = np.random.default_rng(0).integers(1, 200, SHAPE).astype(np.uint8)


def spoilt(value: float) -> np.ndarray:
    voxels = VOXELS.astype(np.float32)
    voxels[0, 0, 0] = value
    return voxels


def test_row_34_flipped_bits_in_a_volume(hospitals: Hospitals) -> None:
    """Three of them; that 400 of 400 are found is in tests/data/test_nifti.py."""
    hospitals.refuses(*(("corrupt file FILE", flipped(share)) for share in (0.25, 0.5, 0.75)))


def test_row_35_truncated_and_empty_files_and_a_bad_magic(hospitals: Hospitals) -> None:
    """A code leaves, not even a hashed name; the site itself is told the file."""
    hospitals.refuses(
        ("corrupt file FILE", cut(200)),
        ("corrupt file FILE", cut(0)),
        ("corrupt file FILE", lambda file: file.write_bytes(b"no image at all") and None),
        ("missing file", lambda file: file.unlink()),
    )


def test_row_36_a_header_that_asks_for_terabytes(hospitals: Hospitals) -> None:
    hospitals.refuses(("wrong shape 32767x32767x32767", header("dim", [3, 32767, 32767, 32767, 1, 1, 1, 1])))


def test_row_37_a_file_that_inflates_without_end(hospitals: Hospitals) -> None:
    hospitals.refuses(("FILE inflates to more than the", bomb))


def test_row_38_voxels_that_are_no_image(hospitals: Hospitals) -> None:
    hospitals.refuses(
        ("1 voxels of FILE are NaN or infinite", volume(spoilt(np.nan))),
        ("1 voxels of FILE are NaN or infinite", volume(spoilt(np.inf))),
        ("all voxels of FILE are equal", volume(np.full(SHAPE, 7, np.uint8))),
    )


def test_row_39_another_geometry(hospitals: Hospitals) -> None:
    """There are no label images, so that none can have another grid."""
    hospitals.refuses(
        ("FILE: the affine does not map voxels to space", volume(VOXELS, np.zeros((4, 4)))),
        ("wrong shape 12x16x11", volume(VOXELS[..., 1:])),
        ("FILE: voxels of 3x3x2 mm", volume(VOXELS, np.diag([3.0, 3.0, 2.0, 1.0]))),
        ("wrong shape 12x16x12x3", volume(np.stack([VOXELS] * 3, axis=-1))),
    )


def test_row_40_a_site_without_examples(hospitals: Hospitals, catalogue: Any) -> None:
    """Whose task gives it none to train on abstains; whose list of subjects is empty is told that it must be wrong."""
    wire = catalogue.Ready("fedavg")
    wire.bench.sites = lambda bench=wire.bench: {**catalogue.toy.Bench.sites(bench), HOSTILE: bench.site(2, 0)}
    outcome, _ = wire.play()
    assert [record.abstained for record in outcome.rounds] == [[HOSTILE], [HOSTILE], []]
    assert compute_digest(outcome.weights) == wire.without()
    hospitals.subset = []
    assert "there are no subjects" in hospitals.refuses()


def test_row_41_a_site_of_one_class(hospitals: Hospitals) -> None:
    """Its loss is defined and it contributes; the area under its curve is left out rather than made up."""
    hospitals.task = "sex_classification"
    table = hospitals.damaged / "participants.tsv"
    table.write_text(table.read_text().replace("\tM\t", "\tF\t"))
    outcome = hospitals.run()
    assert all(record.sites_contributed == SITES for record in outcome.rounds)
    figures = outcome.evaluation.sites[HOSTILE]
    assert "auc" not in figures
    assert math.isfinite(figures["accuracy"])
    assert compute_digest(outcome.weights) != compute_digest(hospitals.run(OTHERS).weights)


def test_row_42_labels_outside_the_classes(hospitals: Hospitals) -> None:
    hospitals.task = "sex_classification"
    table = hospitals.damaged / "participants.tsv"
    table.write_text(table.read_text().replace("\tM\t", "\tX\t", 4))
    assert "sex 'X' in participants.tsv; expected M or F" in hospitals.refuses()


def test_row_43_a_subjects_name_leaves_neither_in_answers_nor_in_logs(
    hospitals: Hospitals, caplog: pytest.LogCaptureFixture
) -> None:
    """In a run that goes well and in one that does not; over mTLS and on the server's disk: test_deployed.py."""
    caplog.set_level(logging.DEBUG)
    assert all(record.sites_contributed == SITES for record in hospitals.run().rounds)
    hospitals.refuses(("corrupt file FILE", flipped(0.5)))
    assert CANARY in str(hospitals.file(0))
    assert CANARY not in caplog.text
    assert not any(CANARY.encode() in sent for sent in hospitals.left)


def test_what_a_sites_filter_marks_as_failed_takes_no_object_along(hospitals: Hospitals) -> None:
    """Between executor and encoder an answer holds objects that the server's FLARE would end its process over."""
    hospitals.run()
    hospital = hospitals.hospitals["site-1"]
    stopped = make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR)
    stopped["flare_sparse.update"] = object()
    assert set(fobs.loads(fobs.dumps(EncodeUpdate().process(stopped, hospital.fl_ctx)))) == {"__headers__"}
