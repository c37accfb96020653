"""The parts of the installer that decide; installing itself is what `make install` does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import install, runner
from scripts.install import Environment
from scripts.runner import InstallError, Runner
from vllm_pd import lmcache_options

UV_FAILS = "raise SystemExit('error: No solution found')"


def test_a_cpu_machine_leaves_out_what_breaks_beside_a_cpu_torch() -> None:
    metadata = "\n".join(
        [
            'torch==2.13.0+cpu; platform_machine == "x86_64"',
            "torchvision; platform_machine != 'riscv64'",
            "torchaudio",
            "torchcodec>=0.14",
            "transformers<5.20.0,>=5.16.1",
            "fastapi[standard]<0.137.0",
            'scipy; extra == "bench"',
            "",
        ]
    )
    assert install.cpu_requirements(metadata) == [
        'torch==2.13.0+cpu; platform_machine == "x86_64"',
        "transformers<5.20.0,>=5.16.1",
        "fastapi[standard]<0.137.0",
    ]


def test_the_gpu_build_decides_which_vllm_is_installed() -> None:
    assert install.install_cuda_vllm in install.plan("cuda")
    assert install.install_cpu_vllm not in install.plan("cuda")
    assert install.install_cpu_vllm in install.plan("cpu")
    for build in ("cuda", "cpu"):
        assert install.plan(build)[0] is install.create_environment
        assert install.plan(build)[-1] is install.verify


def test_lmcache_is_installed_as_users_are_told_to_and_only_beside_the_cpu_build() -> None:
    assert install.install_lmcache in install.plan("cpu")
    assert install.install_lmcache not in install.plan("cuda")
    names = {pinned.partition("==")[0] for pinned in install.LMCACHE}
    told = lmcache_options.INSTALL.removeprefix("pip install --no-deps ").split()
    assert {name.partition("==")[0] for name in told} == names
    assert f"lmcache=={lmcache_options.TESTED}" in told and f"lmcache=={lmcache_options.TESTED}" in install.LMCACHE


def test_the_metadata_wheel_gives_a_name_and_version_and_no_module(tmp_path: Path) -> None:
    wheel = install.write_metadata_wheel(tmp_path, "vllm", "0.32.0+cpu")
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, timeout=120)
    code = "from importlib.metadata import distribution as d; x = d('vllm'); print(x.version, len(x.files))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(target)!r}); {code}"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split()[0] == "0.32.0+cpu"
    assert [path.name for path in target.iterdir()] == ["vllm-0.32.0+cpu.dist-info"]


def test_a_failed_step_is_tried_again_and_then_shows_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PAUSE_S", 0.0)
    run = Runner(tmp_path / "install.log")
    count = tmp_path / "count"
    code = f"open({str(count)!r}, 'a').write('x'); print('connection reset'); raise SystemExit(3)"
    with pytest.raises(InstallError, match=r"The step 'download' failed with status 3") as caught:
        run.run("download", [sys.executable, "-c", code], attempts=3)
    assert count.read_text() == "xxx"
    assert caught.value.tail == ["connection reset"]
    assert (tmp_path / "install.log").read_text().count("connection reset\n") == 3


def test_a_step_that_the_registry_refused_is_not_tried_again(tmp_path: Path) -> None:
    run = Runner(tmp_path / "install.log")
    count = tmp_path / "count"
    code = f"open({str(count)!r}, 'a').write('x'); raise SystemExit('ERROR: No matching distribution found for x')"
    with pytest.raises(InstallError):
        run.run("download", [sys.executable, "-c", code], attempts=3)
    assert count.read_text() == "x"


def test_a_step_that_works_at_the_second_attempt_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PAUSE_S", 0.0)
    seen = tmp_path / "seen"
    code = f"import pathlib; p = pathlib.Path({str(seen)!r}); ok = p.exists(); p.touch(); raise SystemExit(not ok)"
    Runner(tmp_path / "install.log").run("download", [sys.executable, "-c", code], attempts=2)


def test_an_environment_that_does_not_exist_has_no_versions(tmp_path: Path) -> None:
    assert Environment(tmp_path / "none").version("vllm") == ""


class Told(Environment):
    """An environment whose uv and pip only write down that they were asked; uv fails where it is told to."""

    def __init__(self, folder: Path, *, fails: bool) -> None:
        super().__init__(folder)
        self.asked = folder / "asked"
        self.fails = fails
        self.__dict__["uv"] = {"UV_FIND_LINKS": "/somewhere"}

    def _command(self, name: str, code: str) -> list[str]:
        note = f"import os; open({str(self.asked)!r}, 'a').write({name!r} + os.environ.get('UV_FIND_LINKS', '') + ' ')"
        return [sys.executable, "-c", f"{note}; {code}"]

    def uv_install(self, *arguments: str) -> list[str]:
        return self._command("uv", UV_FAILS if self.fails else "pass")

    def pip_install(self, *arguments: str) -> list[str]:
        return self._command("pip", "pass")


@pytest.mark.parametrize(("fails", "asked"), [(False, "uv/somewhere "), (True, "uv/somewhere pip ")])
def test_pip_does_what_uv_cannot(tmp_path: Path, fails: bool, asked: str) -> None:
    env = Told(tmp_path, fails=fails)
    install.install(env, Runner(tmp_path / "install.log"), "a package", "package")
    assert env.asked.read_text() == asked


def test_what_pip_is_configured_with_is_not_written_to_the_log(tmp_path: Path) -> None:
    run = Runner(tmp_path / "install.log")
    code = "import os; assert os.environ['UV_DEFAULT_INDEX']"
    run.run("x", [sys.executable, "-c", code], variables={"UV_DEFAULT_INDEX": "https://me:secret@mirror/simple"})
    assert "secret" not in (tmp_path / "install.log").read_text()
