"""Bad input, section 4: a site's own data, through the site's FLARE components and back, FOBS included."""

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
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContextManager
from nvflare.apis.shareable import make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs

from flare_sparse.config.assemble import assemble
from flare_sparse.config.loading import parse_job
from flare_sparse.core.params import compute_digest
from flare_sparse.flare.checkpoints import CHECKPOINTS_VARIABLE
from flare_sparse.flare.controller import decode_reply
from flare_sparse.flare.executor import EncodeUpdate, SparseExecutor
from flare_sparse.flare.payload import TASK, message_to_shareable
from flare_sparse.flare.session import SiteSession
from flare_sparse.rounds.endpoints.server import ServerEndpoint
from flare_sparse.rounds.federation.loop import Federation
from flare_sparse.rounds.federation.records import Outcome
from flare_sparse.rounds.federation.roster import Connections
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.tasks.data.phantom import write_phantoms
from flare_sparse.wire.ledger import Ledger

SHAPE = (12, 16, 12)
SITES, OTHERS, HOSTILE = ["site-1", "site-2", "site-3"], ["site-1", "site-3"], "site-2"
CANARY = "CANARY7f3a"
"""Part of the second site's folder and of its subjects' names; nothing that leaves the site may contain it."""

Damage = Callable[[Path], None]


class Hospital:
    """One site: FLARE's filters and executor around its data."""

    def __init__(self, folder: Path, name: str, job: dict[str, Any], data: Path, subset: list[str] | None):
        for part in ("local", "run", "config"):
            (folder / part).mkdir(parents=True)
        settings = {"data": str(data), "subset": subset}
        (folder / "local" / "flare_sparse.yaml").write_text(yaml.safe_dump(settings))
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
        self.folder, self.executor = folder, SparseExecutor("fedavg", "brain_age", {})

    def reply(self, message: np.ndarray) -> bytes:
        """Return the bytes that FLARE would send in reply to a request."""
        reply = self.executor.execute(TASK, message_to_shareable(message, {}), self.fl_ctx, Signal())
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
        self.sent: list[bytes] = []

    def file(self, number: int) -> Path:
        """Return the volume of one of the second site's subjects."""
        name = self.subjects[number]
        return self.damaged / name / "anat" / f"{name}_T1w.nii.gz"

    def run(self, sites: list[str] = SITES) -> Outcome:
        """Run FedAvg over two rounds."""
        self.runs += 1
        network = {"name": "brain_age_cnn_3mm", "channels": [2, 2], "reduced": 2}
        task = {"name": self.task, "shape": list(SHAPE), "spacing": [3, 3, 3], "downsample": 2, "model": network}
        method = {"name": "fedavg", "rounds": 2, "training": {"epochs": 1, "lr": 0.01}}
        job = {"name": "data", "seed": 1, "method": method, "task": task}
        assembly = assemble(parse_job(job))
        server = ServerEndpoint(assembly.layout, assembly.run_id, "float32", Ledger())
        self.hospitals = {name: self._hospital(name, job) for name in sites}

        def deliver(attempt: Any) -> dict[str, Any]:
            replies = {}
            for name, message in attempt.messages.items():
                data = self.hospitals[name].reply(message)
                self.sent.append(data)
                replies[name] = decode_reply(server, name, fobs.loads(data), logging.getLogger())
            return replies

        rules = RoundRules(quarantine_after=0)
        federation = Federation(
            assembly.method, server, assembly.task.metric, Connections(lambda: sites, deliver), rules=rules
        )
        return federation.run(assembly.weights)

    def _hospital(self, name: str, job: dict[str, Any]) -> Hospital:
        folder = self.folder / f"run-{self.runs}" / name
        if name == HOSTILE:
            return Hospital(folder, name, job, self.damaged, self.subset)
        number = int(name[-1])
        return Hospital(folder, name, job, self.brains, [f"sub-0{number}00{i}" for i in range(1, 4)])

    def assert_rejects(self, *damages: tuple[str, Damage]) -> str:
        """Damage one subject each; assert that the site names each finding and that only a code leaves it.

        Returns the error text at the site.
        """
        for number, (_, damage) in enumerate(damages):
            damage(self.file(number))
        outcome = self.run()
        assert all(record.rejected == {HOSTILE: "E_DATA"} for record in outcome.rounds)
        assert all(record.sites_contributed == OTHERS and record.is_balanced for record in outcome.rounds)
        error = self.hospitals[HOSTILE].error
        for number, (finding, _) in enumerate(damages):
            assert f"{self.subjects[number]}: {finding}" in error.replace(self.file(number).name, "FILE"), error
        assert not any(CANARY.encode() in sent for sent in self.sent)
        assert compute_digest(outcome.weights) == compute_digest(self.run(OTHERS).weights)
        return error


@pytest.fixture(scope="module")
def brains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Phantoms of three sites; the names of the second site's subjects contain the canary."""
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
    flare_decomposers.register()  # what FLARE registers in every process
    common_decomposers.register()
    return Hospitals(tmp_path, brains)


def flip_bit(share: float) -> Damage:
    def damage(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[int(share * len(data))] ^= 16
        file.write_bytes(data)

    return damage


def truncate(length: int) -> Damage:
    return lambda file: file.write_bytes(file.read_bytes()[:length]) and None


def write_volume(voxels: np.ndarray, affine: np.ndarray | None = None) -> Damage:
    def damage(file: Path) -> None:
        image = nib.Nifti1Image(voxels, None)
        image.header.set_sform(np.diag([3.0, 3.0, 3.0, 1.0]) if affine is None else affine, code=2)
        nib.save(image, file)

    return damage


def change_header(field: str, value: Any) -> Damage:
    def damage(file: Path) -> None:
        data = gzip.decompress(file.read_bytes())
        header = nib.Nifti1Header(data[:348])
        header[field] = value
        file.write_bytes(gzip.compress(header.binaryblock + data[348:]))

    return damage


def inflate(file: Path) -> None:
    data = gzip.decompress(file.read_bytes())
    with gzip.open(file, "wb", compresslevel=1) as stream:
        stream.write(data)
        for _ in range(64):
            stream.write(bytes(2**20))


VOXELS = np.random.default_rng(0).integers(1, 200, SHAPE).astype(np.uint8)


def build_voxels(value: float) -> np.ndarray:
    voxels = VOXELS.astype(np.float32)
    voxels[0, 0, 0] = value
    return voxels


@pytest.mark.slow
@pytest.mark.row(34)
def test_flipped_bits_in_a_volume_are_found(hospitals: Hospitals) -> None:
    """tests/data/test_nifti.py flips 400 bits."""
    hospitals.assert_rejects(*(("corrupt file FILE", flip_bit(share)) for share in (0.25, 0.5, 0.75)))


@pytest.mark.slow
@pytest.mark.row(35)
def test_truncated_empty_missing_and_foreign_files_are_found(hospitals: Hospitals) -> None:
    """Only a code leaves the site; the error text at the site names the file."""
    hospitals.assert_rejects(
        ("corrupt file FILE", truncate(200)),
        ("corrupt file FILE", truncate(0)),
        ("corrupt file FILE", lambda file: file.write_bytes(b"no image at all") and None),
        ("missing file", lambda file: file.unlink()),
    )


@pytest.mark.slow
@pytest.mark.row(36)
def test_header_of_terabytes_is_rejected(hospitals: Hospitals) -> None:
    hospitals.assert_rejects(
        ("wrong shape 32767x32767x32767", change_header("dim", [3, 32767, 32767, 32767, 1, 1, 1, 1]))
    )


@pytest.mark.slow
@pytest.mark.row(37)
def test_compression_bomb_is_rejected(hospitals: Hospitals) -> None:
    hospitals.assert_rejects(("FILE inflates to more than the", inflate))


@pytest.mark.slow
@pytest.mark.row(38)
def test_nan_infinite_and_constant_voxels_are_rejected(hospitals: Hospitals) -> None:
    hospitals.assert_rejects(
        ("1 voxels of FILE are NaN or infinite", write_volume(build_voxels(np.nan))),
        ("1 voxels of FILE are NaN or infinite", write_volume(build_voxels(np.inf))),
        ("all voxels of FILE are equal", write_volume(np.full(SHAPE, 7, np.uint8))),
    )


@pytest.mark.slow
@pytest.mark.row(39)
def test_another_geometry_is_rejected(hospitals: Hospitals) -> None:
    """The tasks have no label images, so no grid of a label image is checked."""
    hospitals.assert_rejects(
        ("FILE: the affine does not map voxels to space", write_volume(VOXELS, np.zeros((4, 4)))),
        ("wrong shape 12x16x11", write_volume(VOXELS[..., 1:])),
        ("FILE: voxels of 3x3x2 mm", write_volume(VOXELS, np.diag([3.0, 3.0, 2.0, 1.0]))),
        ("wrong shape 12x16x12x3", write_volume(np.stack([VOXELS] * 3, axis=-1))),
    )


@pytest.mark.slow
@pytest.mark.row(40)
def test_site_without_examples_abstains_and_one_without_subjects_fails(hospitals: Hospitals, catalogue: Any) -> None:
    """A site whose task has no training example abstains; an empty list of subjects is an error at the site."""
    wire = catalogue.MethodWire("fedavg")
    wire.bench.sites = lambda bench=wire.bench: {**catalogue.toy.ToyBench.sites(bench), HOSTILE: bench.site(2, 0)}
    outcome, _ = wire.run()
    assert [record.abstained for record in outcome.rounds] == [[HOSTILE], [HOSTILE], []]
    assert compute_digest(outcome.weights) == wire.compute_digest_without_site()
    hospitals.subset = []
    assert "there are no subjects" in hospitals.assert_rejects()


@pytest.mark.slow
@pytest.mark.row(41)
def test_site_of_one_class_contributes_without_an_auc(hospitals: Hospitals) -> None:
    """Its loss is defined; the area under the curve is not and is left out."""
    hospitals.task = "sex_classification"
    table = hospitals.damaged / "participants.tsv"
    table.write_text(table.read_text().replace("\tM\t", "\tF\t"))
    outcome = hospitals.run()
    assert all(record.sites_contributed == SITES for record in outcome.rounds)
    figures = outcome.evaluation.sites[HOSTILE]
    assert "auc" not in figures
    assert math.isfinite(figures["accuracy"])
    assert compute_digest(outcome.weights) != compute_digest(hospitals.run(OTHERS).weights)


@pytest.mark.slow
@pytest.mark.row(42)
def test_labels_outside_the_classes_are_rejected(hospitals: Hospitals) -> None:
    hospitals.task = "sex_classification"
    table = hospitals.damaged / "participants.tsv"
    table.write_text(table.read_text().replace("\tM\t", "\tX\t", 4))
    assert "sex 'X' in participants.tsv; expected F or 0 (female), M or 1 (male)" in hospitals.assert_rejects()


@pytest.mark.slow
@pytest.mark.row(43)
def test_subject_names_are_neither_in_replies_nor_in_logs(
    hospitals: Hospitals, caplog: pytest.LogCaptureFixture
) -> None:
    """In a run that succeeds and one that fails; tests/integration/test_deployed.py searches the server's disk."""
    caplog.set_level(logging.DEBUG)
    assert all(record.sites_contributed == SITES for record in hospitals.run().rounds)
    hospitals.assert_rejects(("corrupt file FILE", flip_bit(0.5)))
    assert CANARY in str(hospitals.file(0))
    assert CANARY not in caplog.text
    assert not any(CANARY.encode() in sent for sent in hospitals.sent)


def test_failed_result_carries_no_objects(hospitals: Hospitals) -> None:
    """Between executor and encoder a result holds objects that FLARE's server cannot deserialize: it would exit."""
    hospitals.run()
    hospital = hospitals.hospitals["site-1"]
    stopped = make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR)
    stopped["flare_sparse.update"] = object()
    assert set(fobs.loads(fobs.dumps(EncodeUpdate().process(stopped, hospital.fl_ctx)))) == {"__headers__"}
