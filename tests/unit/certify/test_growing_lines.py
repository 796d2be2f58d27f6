"""Lines of a file that is still being written."""

from tenuto.certify.runner import JsonTail


def test_whole_lines_come_once_and_a_cut_one_waits_for_its_end(tmp_path):
    path = tmp_path / "lines"
    lines = JsonTail(path)
    assert lines.new() == []
    with path.open("w") as file:
        file.write('{"a": 1}\n{"b"')
        file.flush()
        assert lines.new() == [{"a": 1}]
        assert lines.new() == []
        file.write(": 2}\n")
    assert lines.new() == [{"b": 2}]
