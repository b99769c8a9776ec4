"""Settings: the file that counts, what is over it, and where each value came from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from byssus import config
from byssus.errors import InputError


def write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, "utf-8")
    return folder / name


def load(folder: Path, flags: dict[str, str | None] | None = None, **variables: str) -> config.Config:
    return config.load(flags, environ=variables, directory=str(folder))


def test_without_a_file_everything_is_a_default(tmp_path: Path) -> None:
    found = load(tmp_path)
    assert found.file is None
    assert {found.database, found.app, found.agent, found.model} == {config.Setting(None, "default", "default")}
    assert found.keys["anthropic"] == config.Setting("ANTHROPIC_API_KEY", "default", "default")


def test_a_flag_is_over_a_variable_and_a_variable_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "byssus.toml", 'database = "file.db"\nmodel = "local"\napp = "a:b"\n')
    found = load(tmp_path, {"database": "flag.db", "model": None}, BYSSUS_DB="variable.db", BYSSUS_MODEL="openai:x")
    assert found.database == ("flag.db", "--db", "flag")
    assert found.model == ("openai:x", "BYSSUS_MODEL", "variable")
    assert found.app == ("a:b", str(file), "file")
    assert [each.rank for each in load(tmp_path, {"database": "x"}, BYSSUS_MODEL="y")[:4]] == [3, 1, 0, 2]


def test_an_empty_variable_counts_as_not_set_and_an_empty_flag_as_a_value(tmp_path: Path) -> None:
    write(tmp_path, "byssus.toml", 'app = "a:b"\n')
    assert load(tmp_path, BYSSUS_APP="").app.value == "a:b"
    assert load(tmp_path, {"app": ""}).app == ("", "--app", "flag")


def test_the_nearest_file_wins_and_files_are_not_merged(tmp_path: Path) -> None:
    write(tmp_path, "byssus.toml", 'database = "far.db"\nmodel = "local"\n')
    below = tmp_path / "project" / "src"
    below.mkdir(parents=True)
    assert load(below).database.value == str(tmp_path / "far.db")
    near = write(tmp_path / "project", "pyproject.toml", '[tool.byssus]\ndatabase = "near.db"\n')
    found = load(below)
    assert (found.file, found.database.value, found.model.value) == (
        str(near),
        str(tmp_path / "project/near.db"),
        None,
    )


def test_in_one_directory_byssus_toml_wins_over_pyproject_toml(tmp_path: Path) -> None:
    write(tmp_path, "pyproject.toml", '[tool.byssus]\nmodel = "local"\n')
    assert load(tmp_path).model.value == "local"
    write(tmp_path, "byssus.toml", 'model = "openai:x"\n')
    assert load(tmp_path).model.value == "openai:x"


@pytest.mark.parametrize("text", ["[project]\nname = 'byssus-shop'\n", "this is [ no TOML at all", ""])
def test_a_pyproject_without_our_table_is_passed_over(tmp_path: Path, text: str) -> None:
    write(tmp_path, "byssus.toml", 'model = "local"\n')
    write(tmp_path / "below", "pyproject.toml", text)
    assert load(tmp_path / "below").model.value == "local"


def test_a_file_may_be_named_outright(tmp_path: Path) -> None:
    write(tmp_path, "byssus.toml", 'model = "local"\n')
    other = write(tmp_path / "etc", "other.toml", 'database = "x.db"\n')
    found = load(tmp_path, BYSSUS_CONFIG=str(other))
    assert (found.file, found.database.value) == (str(other), str(tmp_path / "etc/x.db"))
    assert load(tmp_path, BYSSUS_CONFIG=os.devnull).model.value is None
    with pytest.raises(InputError, match=r"nowhere\.toml cannot be read .*BYSSUS_CONFIG=FILE"):
        load(tmp_path, BYSSUS_CONFIG=str(tmp_path / "nowhere.toml"))


@pytest.mark.parametrize("place", ["/abs/x.db", "~/x.db", ":memory:", "postgresql://server/app"])
def test_a_place_that_is_no_relative_path_is_kept(tmp_path: Path, place: str) -> None:
    write(tmp_path, "byssus.toml", f'database = "{place}"\n')
    assert load(tmp_path).database.value == place


def test_the_app_is_imported_from_where_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "byssus.toml", 'app = "shop:support"\n')
    below = tmp_path / "below"
    below.mkdir()
    monkeypatch.chdir(below)
    assert load(below).folder == str(tmp_path)
    assert load(below, {"app": "other:x"}).folder == str(below)


def test_an_agent_that_was_chosen_for_another_app_is_dropped(tmp_path: Path) -> None:
    write(tmp_path, "byssus.toml", 'app = "shop:agents"\nagent = "support"\n')
    assert load(tmp_path).agent.value == "support"
    assert load(tmp_path, BYSSUS_APP="other:one").agent.value is None
    assert load(tmp_path, {"agent": "sales"}).agent.value == "sales"


def test_a_key_comes_from_the_variable_that_the_file_names(tmp_path: Path) -> None:
    file = write(tmp_path, "byssus.toml", '[keys]\nopenai = "SHOP_KEY"\n')
    found = load(tmp_path)
    assert found.keys["openai"] == ("SHOP_KEY", str(file), "file")
    assert found.key_of("openai", {"SHOP_KEY": "secret", "OPENAI_API_KEY": "other"}) == "secret"
    assert found.key_of("openai", {"OPENAI_API_KEY": "other"}) is None
    assert found.key_of("anthropic", {"ANTHROPIC_API_KEY": "a"}) == "a"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('databse = "x.db"', ["unknown key 'databse'", "did you mean 'database'?"]),
        ("colour = 1", ["unknown key 'colour'", "known keys: database, app, agent, model, keys"]),
        ("database = 3", ["database in", "must be a non-empty string, got 3", 'database = "chat.db"']),
        ('model = ""', ["model in", "must be a non-empty string"]),
        ("app = ['a:b']", ["app in", "must be a non-empty string, got ['a:b']"]),
        ("keys = 1", ["keys in", "must be a table"]),
        ('[keys]\nopenia = "X"', ["unknown key 'keys.openia'", "did you mean 'openai'?"]),
        ("[keys]\nopenai = 1", ["keys.openai in", "name of the environment variable"]),
        ('model = "x"\ndatabase = = 1', ["is not valid TOML", "line 2"]),
        ("a=" + "[" * 5000, ["is not valid TOML"]),
    ],
)
def test_a_mistake_in_the_file_names_the_file_the_key_and_what_to_write(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    file = write(tmp_path, "byssus.toml", text)
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    assert all(word in str(caught.value) for word in [str(file), *words]), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_in_the_file_is_refused_and_not_shown(tmp_path: Path) -> None:
    write(tmp_path, "byssus.toml", '[keys]\nanthropic = "sk-ant-secret"\n')
    with pytest.raises(InputError, match="not the key itself") as caught:
        load(tmp_path)
    assert "secret" not in str(caught.value)


def test_the_repr_of_a_setting_shows_no_password(tmp_path: Path) -> None:
    found = load(tmp_path, BYSSUS_DB="postgresql://ann:secret@host/db")
    assert found.database.value == "postgresql://ann:secret@host/db"
    shown = "Setting(value='postgresql://***@host/db', origin='BYSSUS_DB', layer='variable')"
    assert repr(found).startswith(f"Config(database={shown}, app=Setting(value=None, origin='default', ")


def test_a_file_that_is_not_utf8_is_named_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "byssus.toml").write_bytes(b'model = "local"\napp = "\xff"\n')
    with pytest.raises(InputError, match=r"byssus\.toml is not UTF-8 \(line 2\)"):
        load(tmp_path)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "byssus.toml").write_bytes(b'\xef\xbb\xbfmodel = "local"\n')
    assert load(tmp_path).model.value == "local"


@pytest.mark.parametrize("text", ["[tool]\nbyssus = 3", '[[tool.byssus]]\nmodel = "x"'])
def test_our_table_of_a_pyproject_must_be_a_table(tmp_path: Path, text: str) -> None:
    write(tmp_path, "pyproject.toml", text)
    with pytest.raises(InputError, match=r"tool\.byssus in .*pyproject\.toml must be a table"):
        load(tmp_path)


def test_a_file_of_another_user_does_not_choose_the_code_that_runs() -> None:
    assert config.is_trusted(1000, here=1000, user=1000)
    assert config.is_trusted(0, here=1000, user=1000)
    assert config.is_trusted(1000, here=1000, user=0)  # root in the directory of somebody
    assert not config.is_trusted(1001, here=1000, user=1000)
    assert not config.is_trusted(1001, here=0, user=0)


def test_a_directory_that_is_gone_has_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert config.load(environ={}).file is None


def test_variables_that_are_none_of_ours_are_named() -> None:
    environ = {"BYSSUS_DB": "x", "BYSSUS_CONFIG": "y", "BYSSUS_MODLE": "z", "HOME": "/"}
    assert config.unknown_variables(environ) == ["BYSSUS_MODLE"]
