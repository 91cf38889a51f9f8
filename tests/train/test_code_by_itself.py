"""Code of one's own runs without a word, in other processes than the one that trained, where one has a right to it."""

import os
import shutil
import sys

import pytest
from support import own_model
from support.code_of_run import BIAS, claimed, load
from support.commands import assert_refused, outside, start

pytestmark = [
    pytest.mark.full,
    pytest.mark.light_compile,
    pytest.mark.few_programs,
    pytest.mark.shared_programs,
]
NOT_BY_ITSELF = "is not run by itself"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working folder, of a user whose state is kept in a folder beside it."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "here"


def as_another(monkeypatch, here):
    """From here on the user is one who has run nothing yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(here.parent / "state of another"))


def runs(*command, **options):
    """Whether a command runs the code of its run folder; these stand-ins for runs have no checkpoint."""
    done = outside(*command, **options)
    assert done.status in (0, 2, 3), done.err
    if done.status:
        assert_refused(done, 3 if NOT_BY_ITSELF not in done.err else 2, f"checkpoint|{NOT_BY_ITSELF}")
    return done.status != 2


def test_a_preset_of_the_working_folder(here, monkeypatch):
    """Also on a resume by the same command, and once its comments and settings were edited."""
    file = own_model.write(here / "code")
    train = ("train", "code/mine.py", "--out", "run", "--json")
    assert outside(*train).status == 0
    auc = outside("eval", "run", "--json").result["auc"]
    assert outside(*train, "train.steps=3").status == 0
    own_model.edit(file, "FACTOR = 1.0", "# of the logits\nFACTOR = 1.0")
    own_model.edit(file, "steps=2", "steps=4")
    assert outside("eval", "run", "--json").result["auc"] != auc
    as_another(monkeypatch, here)
    assert_refused(outside("eval", "run"), 2, NOT_BY_ITSELF)
    assert outside(*train, "train.steps=5").status == 0  # he names it himself, and from now on is known to
    assert outside("eval", "run").status == 0


def test_a_preset_elsewhere(here, monkeypatch):
    file = own_model.write(here.parent / "elsewhere")
    out = claimed(load(file), here / "run")
    monkeypatch.chdir(here.parent)
    assert runs("eval", out)
    as_another(monkeypatch, here)
    assert not runs("eval", out)
    assert outside("show", file).status == 0
    assert runs("eval", out)
    own_model.edit(file.parent / "head.py", *BIAS)
    assert "head.py changed" in outside("eval", out).err


def test_several_tasks_with_one_preset(here):
    """As in a job array: each task does one run of a sweep of a preset that nobody has run before."""
    own_model.write(here / "code")
    (here / "mine.toml").write_text('preset = "code/mine.py"\n[grid]\nseed = [0, 1]\n')
    tasks = [start("sweep", "mine.toml", "--index", index) for index in range(2)]
    for task in tasks:
        assert task.communicate() and task.returncode == 0
    for run in (here / "runs/sweep-mine").glob("*/config.json"):
        assert outside("eval", run.parent).status == 0
    assert outside("sweep", "mine.toml", "--results").status == 0


def package(folder):
    own_model.edit(own_model.write(folder / "my_models", "linear.py"), "from head", "from .head")
    (folder / "my_models/__init__.py").touch()
    return folder


SCRIPT = "from my_models.linear import config; import recjax; recjax.fit(config, 'run'); recjax.evaluate('run')"


def test_a_script_that_imports_its_module(here, monkeypatch):
    package(here / "code")
    (here / "script.py").write_text(f"import sys; sys.path.insert(0, 'code'); {SCRIPT}")
    script = "import runpy, sys; sys.argv = ['script.py']; runpy.run_path('script.py', run_name='__main__'); sys.exit()"
    with start(before=script) as process:
        assert process.communicate() and process.returncode == 0
    on_path = f"import sys; sys.path.insert(0, {str(here / 'code')!r})"
    assert outside("eval", "run", before=on_path).status == 0
    as_another(monkeypatch, here)
    assert_refused(outside("eval", "run", before=on_path), 2, NOT_BY_ITSELF)


@pytest.mark.parametrize("form", ["plain", "editable"])
def test_an_installed_package(here, monkeypatch, form):
    """Whoever opens the run: the package is his own, and lies where packages are installed to."""
    prefix = here.parent / "python"
    packages = prefix / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    project = package(packages if form == "plain" else here.parent / "project")
    installed = f"import site, sys; site.PREFIXES.append({str(prefix)!r}); site.addsitedir({str(packages)!r})"
    if form == "editable":
        about = packages / "my_models-1.0.dist-info"
        about.mkdir(parents=True)
        (packages / "my_models.pth").write_text(f"{project}\n")
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-models\nVersion: 1.0\n")
        (about / "direct_url.json").write_text(f'{{"url": "file://{project}", "dir_info": {{"editable": true}}}}')
    with start(before=f"{installed}\n{SCRIPT}; sys.exit()") as process:
        assert process.communicate() and process.returncode == 0
    as_another(monkeypatch, here)
    assert outside("eval", "run", before=installed).status == 0
    shutil.rmtree(packages)
    package(here.parent / "project")
    on_path = f"import sys; sys.path.insert(0, {str(here.parent / 'project')!r})"
    assert_refused(outside("eval", "run", before=on_path), 2, NOT_BY_ITSELF)


def test_without_a_home(here, monkeypatch):
    """Somebody whose state cannot be kept learns so, and what to do, when he trains."""
    file = own_model.write(here.parent / "elsewhere")
    (here / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "file"))
    done = outside("train", file, "--out", "run")
    assert done.status == 0 and f"set RECJAX_TRUSTED_CODE={file.parent}, or give them --trust-code" in done.err
    assert_refused(
        outside("eval", "run"), 2, NOT_BY_ITSELF, rf"set RECJAX_TRUSTED_CODE={file.parent}\), or add --trust"
    )
    assert outside("eval", "run", "--trust-code").status == 0
    monkeypatch.setenv("RECJAX_TRUSTED_CODE", f"/nowhere{os.pathsep}{file.parent}")
    assert outside("eval", "run").status == 0


def test_a_record_counts_only_as_it_was_written(here):
    """A link in a run folder may have let anything be written there, and by this very user."""
    file = own_model.write(here / "code")
    out = claimed(load(file), here / "run")
    folder = here.parent / "state/recjax/code"
    assert runs("eval", out)
    (record,) = folder.iterdir()
    content = record.read_bytes()
    for other in (content, b""):
        record.unlink()
        record.write_bytes(other)
        assert not runs("eval", out)
    record.unlink()
    (folder / "x").write_bytes(content)
    (folder / "x").chmod(0o400)
    record.symlink_to(folder / "x")
    assert not runs("eval", out)
    load(file)
    assert runs("eval", out)
    folder.chmod(0o777)
    assert not runs("eval", out)
