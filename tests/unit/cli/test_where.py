"""WHERE may be left out: TENUTO_WHERE, or the folder one stands in, names the repository, and stderr says which."""

import json

import pytest

from tenuto.cli.console.where import default_place, with_place

HERE = "note: the repository is the folder you are in\n"
NAMED = "note: the repository is /ckpts, from TENUTO_WHERE\n"


@pytest.fixture
def inside(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def named(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENUTO_WHERE", str(made))
    return made


@pytest.mark.parametrize(
    "words",
    [
        ("ls", "--run", "gpt"),
        ("ls",),
        ("show", "--run", "gpt", "--leaves"),
        ("show", "model/layers.0.bias", "--run", "gpt"),
        ("show", "--run", "gpt", "model"),
        ("verify", "--structure", "--run", "small"),
        ("tag", "baseline", "--run", "gpt"),
        ("rm", "gpt/a0001/2", "gpt/a0001/8", "--dry-run"),
        ("rm", "2", "--run", "gpt", "--dry-run"),
        ("keep", "--run", "gpt", "--latest", "1", "--dry-run"),
        ("gc", "--dry-run"),
        ("replicate", "--dry-run"),
        ("replicate", "7", "--run", "gpt", "--dry-run"),
        ("flush", "--run", "gpt", "--dry-run"),
    ],
    ids=" ".join,
)
def test_the_folder_one_stands_in_is_the_repository(cli, inside, words):
    """It says what it says where the repository is named, and says that it was not."""
    status, out, err = cli(words[0], inside, *words[1:])
    assert status == 0
    left_out = cli(*words)
    assert (left_out[0], left_out[1].replace(" . ", " /ckpts "), left_out[2].replace(" . ", " /ckpts ")) == (
        status,
        out,
        HERE + err,
    )


def test_the_variable_names_it_and_comes_before_the_folder(cli, named, place, monkeypatch):
    status, out, err = cli("ls", named)
    assert cli("ls") == (status, out, NAMED + err)
    assert cli("tag", "--run", "gpt", "--delete", "nothing")[2].startswith(NAMED)
    monkeypatch.chdir(place)
    assert cli("ls", "--run", "small")[2] == NAMED
    monkeypatch.setenv("TENUTO_WHERE", "")
    assert cli("ls", "--run", "small")[2] == HERE


@pytest.mark.parametrize(
    "text",
    [
        'where = "ckpts"',
        'where = ["ckpts", "/other"]\nkind = "mirror"',
        '[[tiers]]\nwhere = "/nvme"\nper_node = true\n[[tiers]]\nwhere = "ckpts"\n[[tiers]]\nwhere = "s3://b/x"',
    ],
    ids=["one", "mirror", "tiers"],
)
def test_the_settings_file_names_it_from_below_too(cli, place, tmp_path, monkeypatch, text):
    (tmp_path / "tenuto.toml").write_text(text)
    (tmp_path / "source").mkdir()
    monkeypatch.chdir(tmp_path / "source")
    line = text.count("\n", 0, text.index('"ckpts"')) + 1
    status, out, err = cli("ls", "--run", "small")
    assert (status, out) == cli("ls", place, "--run", "small")[:2]
    assert err == f"note: the repository is /ckpts, from {tmp_path}/tenuto.toml:{line}\n"
    assert cli("rm", "gpt/a0001/2", "--dry-run")[0] == 0


def test_a_stripe_of_the_settings_file_is_one_location(tmp_path, monkeypatch, capsys):
    (tmp_path / "tenuto.toml").write_text('where = ["/a", "/b"]\nkind = "stripe"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENUTO_WHERE", raising=False)
    assert default_place() == "stripe:///a,/b"
    assert capsys.readouterr().err == "note: the repository is stripe:///a,/b, from tenuto.toml:1\n"


def test_the_argument_the_variable_and_the_folder_come_before_the_settings_file(cli, place, tmp_path, monkeypatch):
    (tmp_path / "tenuto.toml").write_text('where = "/elsewhere"')
    monkeypatch.chdir(tmp_path)
    assert cli("ls")[0] == 10
    assert cli("ls", place)[0] == 0
    monkeypatch.setenv("TENUTO_WHERE", str(place))
    assert cli("ls")[2] == NAMED
    monkeypatch.delenv("TENUTO_WHERE")
    monkeypatch.chdir(place)
    assert cli("ls")[2] == HERE


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("where = ", "the settings file tenuto.toml is not TOML: Invalid value (at end of document)"),
        ('where = "s3://me:hush@b/x"', "tenuto.toml:1: where holds what looks like a credential"),
    ],
)
def test_a_settings_file_that_names_none_is_not_passed_over(cli, tmp_path, monkeypatch, text, why):
    (tmp_path / "tenuto.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    status, _, err = cli("ls")
    assert status == 2 and err.startswith(f"error: {why}") and "hush" not in err


def test_a_setting_that_is_wrong_elsewhere_does_not_hide_the_checkpoints(cli, place, tmp_path, monkeypatch):
    (tmp_path / "tenuto.toml").write_text('where = "ckpts"\nin_flight = 0')
    monkeypatch.chdir(tmp_path)
    assert cli("ls", "--run", "small")[0] == 0


def test_a_place_that_is_named_is_taken_and_nothing_said(cli, inside, made, tmp_path, monkeypatch):
    monkeypatch.setenv("TENUTO_WHERE", str(tmp_path / "elsewhere"))
    assert cli("ls", made)[2] == ""
    assert cli("show", made, "model", "--run", "gpt")[2] == ""
    assert cli("rm", made, "gpt/a0001/2", "--dry-run")[2] == ""
    assert cli("tag", inside, "good", "--run", "gpt")[2] == ""


def test_a_path_that_is_no_repository_is_not_taken_for_a_checkpoint(cli, inside, tmp_path):
    """Nothing is removed here because of a slip of the pen there."""
    status, _, err = cli("rm", tmp_path / "chekpoints", "gpt/a0001/2", "--yes")
    assert status == 10 and "there is no Tenuto repository" in err
    assert cli("rm", "./chekpoints", "gpt/a0001/2", "--yes")[0] == 10
    assert (inside / "runs/gpt/a0001/step-00000002/manifest.json").exists()


@pytest.mark.parametrize("words", [("ls",), ("show",), ("gc",), ("rm",), ("tag", "good"), ("restore", "out.pt")])
def test_without_any_it_says_how_to_name_one(cli, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    status, out, err = cli(*words)
    assert (status, out) == (2, "")
    assert err.startswith(
        "error: which repository?\nhint: name it as WHERE, set TENUTO_WHERE, or run this in its folder"
    )
    status, out, _ = cli(*words, "--json")
    assert (status, json.loads(out)["schema"]) == (2, "tenuto.error/1")


def test_a_file_is_written_from_the_folder_one_stands_in(cli, inside, tmp_path):
    out = tmp_path / "weights.safetensors"
    status, _, err = cli("restore", out, "--run", "gpt", "--include", "model")
    assert (status, err.startswith(HERE), out.exists()) == (0, True, True)


def test_what_follows_two_dashes_is_never_the_place(named):
    import typer

    from tenuto.cli.application import application

    command = typer.main.get_command(application(["certify"])).commands["certify"]
    context = type(command).context_class(command, info_name="certify")
    words = ["--steps", "3", "--", "python", "train.py"]
    assert with_place(command, context, words) == [str(named), *words]
    assert with_place(command, context, ["here", *words]) == ["here", *words]


def test_help_asks_for_no_place(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli("gc", "--help")[0] == 0
