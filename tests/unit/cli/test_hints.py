"""Every hint that is a command can be typed as it stands, whatever the directory is called."""

import re
import shlex
import shutil

import pytest

from tenuto.cli import main

COMMAND = re.compile(r"^hint: (?:.*: )?(?:`)?((?:tenuto|mkdir|ls|rm) [^`\n]*)", re.M)


@pytest.fixture
def my_run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "my run")


@pytest.fixture
def hint(capsys):
    """The words of the command that the hint of a command's error is."""

    def told(*words):
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        said = capsys.readouterr().err
        assert left.value.code, "no error"
        return shlex.split(COMMAND.search(said)[1], comments=True)

    return told


@pytest.mark.parametrize(
    "words",
    [
        ("ls", "WHERE", "--run", "nobody"),
        ("show", "WHERE", "--run", "nobody"),
        ("show", "WHERE", "--run", "gpt", "--step", "99"),
        ("show", "WHERE", "--run", "gpt", "--step", "a0001/99"),
        ("show", "WHERE", "--run", "gpt", "--rank", "0"),
        ("show", "WHERE", "name", "--run", "gpt", "--timing"),
        ("restore", "WHERE", "out.safetensors", "--run", "gpt", "--include", "nothing"),
        ("rm", "WHERE", "gpt/a0009/2"),
        ("rm", "WHERE", "gpt/a0001/2", "--yes"),
        ("undelete", "WHERE", "77", "--run", "gpt"),
        ("undelete", "WHERE", "7", "--run", "gpt"),
        ("tag", "WHERE", "gold", "--delete", "--step", "2"),
    ],
    ids=" ".join,
)
def test_a_directory_with_a_space_is_one_word(words, my_run, tmp_path, monkeypatch, cli, hint):
    monkeypatch.chdir(tmp_path)
    assert cli("tag", my_run, "gold", "--run", "gpt", "--step", "a0001/2")[0] == 0
    typed = hint(*(my_run if word == "WHERE" else word for word in words))
    assert typed[0] == "tenuto"
    assert str(my_run) in typed


def test_a_directory_that_is_not_there_is_one_word(tmp_path, hint):
    assert hint("bench", tmp_path / "not here") == ["mkdir", "-p", str(tmp_path / "not here")]


def test_the_hint_of_two_options_that_go_apart_does_what_was_meant(my_run, cli, hint):
    assert cli("tag", my_run, "gold", "--run", "gpt", "--step", "7")[0] == 0
    command = hint("tag", my_run, "gold", "--delete", "--step", "7")
    assert cli(*command[1:])[0] == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("out.pt", "--strip", "model/"), "use --include, or write a *.safetensors file"),
        (("out.safetensors", "--include", "model/layers.0.bias", "--strip", "model/layers.0.bias"), "--strip less"),
        (("nowhere at all/out.safetensors",), "ls -ld 'nowhere at all'"),
    ],
)
def test_a_file_that_cannot_be_written_comes_with_a_hint(options, said, place, tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    status, _, err = cli("export", place, *options, "--run", "gpt")
    assert status
    assert f"hint: {said}" in err
