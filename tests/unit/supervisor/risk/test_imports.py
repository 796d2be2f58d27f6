"""Failure logs in their documented layouts. The files are made up, in the columns that their publishers describe."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tenuto.errors import UsageError
from tenuto.supervisor.detectors.contract import END, Sample
from tenuto.supervisor.risk.imports import FORMATS, import_log
from tenuto.supervisor.risk.recording import read_recording, write_recording

BACKBLAZE = """\
date,serial_number,model,capacity_bytes,failure,smart_5_normalized,smart_5_raw,smart_197_raw
2024-03-24,ZA10,ST12000NM0007,12000138625024,0,100,0,
2024-03-25,ZA10,ST12000NM0007,12000138625024,1,96,812,16
2024-03-24,ZA11,ST12000NM0007,12000138625024,0,100,0,0
"""
LANL = """\
System,machine type,nodes,procstot,procsinnode,nodenum,nodenumz,node install,node prod,node decom,fru type,mem,cputype,\
memtype,num intercon,purpose,Prob Started,Prob Fixed,Down Time,Facilities,Hardware,Human Error,Network,Undetermined,\
Software,Same Event
2,cluster,49,6152,80,0,0,5-Apr,5-Jun,current,part,80,1,1,0,graphics.fe,6/21/2005 10:54,6/21/2005 11:00,6,,\
Graphics Accel Hdwr,,,,,No
2,cluster,49,6152,80,1,1,5-Apr,5-Jun,current,part,80,1,1,0,compute,11/02/05 09:10,11/02/05 9:40,30,,,,,,OS,No
"""
NVIDIA = """\
timestamp, index, temperature.gpu, memory.used [MiB], ecc.errors.uncorrected.volatile.total, power.draw [W], name
2026/11/20 08:00:00.123, 0, 64, 70123 MiB, 0, 412.55 W, NVIDIA H100 80GB HBM3
2026/11/20 08:00:00.125, 1, 65, 70124 MiB, [N/A], 398.10 W, NVIDIA H100 80GB HBM3
"""


def imported(tmp_path: Path, name: str, text: str) -> dict[str, list[Sample]]:
    (tmp_path / "log").write_text(text)
    return import_log(tmp_path / "log", name)


def test_drives_fail_at_the_end_of_their_last_day(tmp_path: Path) -> None:
    found = imported(tmp_path, "backblaze", BACKBLAZE)
    assert set(found) == {"ZA10", "ZA11"}
    first, second, end = found["ZA10"]
    assert first.values == {"smart_5_normalized": 100, "smart_5_raw": 0}
    assert second.values["smart_5_raw"] == 812 and second.at - first.at == 86_400
    assert (end.source, end.kind, end.at) == (END, "device", datetime(2024, 3, 26, tzinfo=UTC).timestamp())
    assert all(one.source != END for one in found["ZA11"])


def test_nodes_fail_and_come_back(tmp_path: Path) -> None:
    found = imported(tmp_path, "lanl", LANL)
    end, up = found["2-0"]
    assert (end.source, end.kind) == (END, "device") and up.at - end.at == 360
    assert found["2-1"][0].kind == "failed" and found["2-1"][1].at - found["2-1"][0].at == 1800
    assert datetime.fromtimestamp(found["2-1"][0].at, UTC).year == 2005


def test_gpus_of_a_machine_are_things_of_one_recording(tmp_path: Path) -> None:
    found = imported(tmp_path, "nvidia-smi", NVIDIA)["gpus"]
    assert found[0].values == {
        "0.temperature": 64, "0.memory_used": 70123 * 2**20, "0.ecc_uncorrectable": 0, "0.power_w": 412.55,
    }  # fmt: skip
    assert "1.ecc_uncorrectable" not in found[1].values and "1.power_w" in found[1].values
    assert datetime.fromtimestamp(found[0].at).hour == 8


def test_a_journal_of_the_supervisor_has_the_ends(tmp_path: Path) -> None:
    lines = [
        {"time": "2026-11-20T08:00:00.500+00:00", "event": "supervising", "pid": 1},
        {"time": "2026-11-20T09:00:00.500+00:00", "event": "died", "kind": "hung"},
        {"time": "2026-11-20T10:00:00.500+00:00", "event": "left", "kind": "finished"},
    ]
    found = imported(tmp_path, "journal", "".join(f"{json.dumps(line)}\n" for line in lines))["job"]
    assert [(one.kind, one.at) for one in found] == [("hung", 1795165200.5), ("finished", 1795168800.5)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "\0\0\0", "date,serial_number,failure\nno day,1,0\n"])
def test_what_is_another_kind_of_file_is_refused(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="log"):
        imported(tmp_path, name, text)


def test_a_format_that_there_is_not_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="backblaze, lanl, nvidia-smi, journal"):
        import_log(tmp_path / "log", "backblase")


def test_a_recording_that_was_cut_off_is_read_and_one_that_is_wrong_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    samples = [Sample(1.5, "memory", {"rss": 3.0}), Sample(2.0, END, {}, "killed")]
    write_recording(path, samples)
    assert read_recording(path) == samples
    with open(path, "a") as file:
        file.write('{"at": 3.0, "sou')
    assert read_recording(path) == samples
    with open(path, "a") as file:
        file.write("\n")
    with pytest.raises(UsageError, match=r"telemetry\.jsonl, line 3"):
        read_recording(path)
