"""Declaration of a site's people in its kit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flare_sparse.config.people import PEOPLE_FILE, read_declaration
from flare_sparse.core.errors import ConfigError, DataError
from flare_sparse.flare.site.people import declare_people


def test_proposal_is_printed_written_once_and_read_by_jobs(tmp_path: Path) -> None:
    kit = tmp_path / "site-1"
    for folder in ("startup", "local"):
        (kit / folder).mkdir(parents=True)
    server = {"service": {"target": "server:8002"}}
    (kit / "startup" / "fed_client.json").write_text(json.dumps({"client": {"fqsn": "site-1"}, "servers": [server]}))
    rows = "".join(f"p{i},{'FM'[i % 2]},{'abc'[min(i % 40, 2)]},note {i}\n" for i in range(400))
    (tmp_path / "t.csv").write_text(f"patient,sex,dx,note\n{rows}")
    (kit / "local" / "flare_sparse.yaml").write_text(f"data: {tmp_path / 't.csv'}\nid: patient\n")
    text, left = declare_people(kit)
    assert left == ["dx", "note"]
    assert not (kit / "local" / PEOPLE_FILE).exists()
    assert declare_people(kit, write=True) == (text, left)
    declaration = read_declaration(kit / "local")
    assert declaration is not None
    assert (declaration.id, declaration.columns) == ("patient", {"sex": (("F",), ("M",))})
    with pytest.raises(ConfigError, match="has declared its people"):
        declare_people(kit, write=True)
    (kit / "local" / "flare_sparse.yaml").write_text(f"data: {tmp_path / 't.csv'}\n")
    with pytest.raises(ConfigError, match="add a line such as id: patient"):
        declare_people(kit)
    (kit / "local" / PEOPLE_FILE).write_text("id: [")
    with pytest.raises(DataError, match="cannot be read as a declaration"):
        read_declaration(kit / "local")
