"""What the pages say: their code runs, their messages are raised, their tests and links exist."""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ulysses_ops.tools.api_page import page
from ulysses_ops.tools.readme_tables import find_places

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT_S = 120


def code_of(path: str) -> list[str]:
    return PYTHON.findall((ROOT / path).read_text())


def environment(**more: str) -> dict[str, str]:
    placed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_", "RAY_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(placed)}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# ---- code ----------------------------------------------------------------------------------------


def run_by_torchrun(script: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), str(script)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_first_program_runs_and_is_short(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    assert "torchrun --nproc-per-node 2 example.py" in text
    first = code_of("README.md")[0]
    lines = [
        line for line in first.splitlines() if line and not line.startswith(("import", "from"))
    ]
    assert len(lines) <= 12
    script = tmp_path / "example.py"
    script.write_text(first)
    assert run_by_torchrun(script).count("torch.Size([1, 1024, 8, 64])") == 2


RAY = '''"""As much of Ray as the page uses: tasks are processes."""

from multiprocessing import get_context


class _Task:
    def __init__(self, work):
        self.work = work

    def options(self, *, num_gpus, runtime_env):
        assert runtime_env["env_vars"] and num_gpus == 1
        return self

    def remote(self, *args):
        process = get_context("fork").Process(target=self.work, args=args)
        process.start()
        return process


def remote(work):
    return _Task(work)


def get(processes):
    for process in processes:
        process.join(90)
        assert process.exitcode == 0, process.exitcode


def init():
    pass
'''


@pytest.mark.parametrize(
    "launcher",
    ["torchrun", *(pytest.param(name, marks=pytest.mark.long) for name in ("slurm", "ray"))],
)
def test_ranks_are_launched_as_the_page_says(tmp_path: Path, launcher: str) -> None:
    """Slurm: processes with the variables of srun. Ray: a stand-in for its three calls."""
    attend, by_ray, _mesh = code_of("docs/launch.md")
    script, port = tmp_path / "attend.py", str(free_port())
    script.write_text(attend)
    if launcher == "torchrun":
        printed = run_by_torchrun(script)
    elif launcher == "slurm":
        assert "srun python attend.py" in (ROOT / "docs/launch.md").read_text()
        ranks = []
        for rank in range(2):
            given = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2"}
            env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **given)
            command = [sys.executable, str(script)]
            ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        try:
            printed = "".join(process.communicate(timeout=LIMIT_S)[0] for process in ranks)
        finally:
            for process in ranks:
                process.kill()
        assert [process.returncode for process in ranks] == [0, 0]
    else:
        (tmp_path / "ray.py").write_text(RAY)
        (tmp_path / "ray_launch.py").write_text(
            by_ray.replace("127.0.0.1:29500", f"127.0.0.1:{port}")
        )
        command = [sys.executable, "ray_launch.py", "2", "attend.py"]
        done = subprocess.run(
            command,
            env=environment(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        printed = done.stdout
    assert printed.count("gloo [1, 2] [1, 256, 8, 64]") == 2


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_code_on_pages_is_python_and_imports_what_exists(path: Path) -> None:
    found = 0
    for code in PYTHON.findall(path.read_text()):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ulysses_ops"):
                imports = f"from {node.module} import {', '.join(a.name for a in node.names)}"
                exec(imports, {})
                found += 1
    assert found or path.name not in ("README.md", "quick_start.md", "migration.md", "launch.md")


# ---- messages ------------------------------------------------------------------------------------


def messages() -> Iterator[str]:
    """Every text of the package, what depends on the case as an ellipsis."""
    for folder in ("ulysses_ops", "graphs"):
        for path in sorted((ROOT / folder).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                    yield "".join(map(str, parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def is_message(key: str, texts: list[str]) -> bool:
    pattern = ".*".join(re.escape(part) for part in key.split("…"))
    return any(re.search(pattern, text, re.DOTALL) for text in texts)


def test_troubleshooting_is_by_messages_that_are_raised() -> None:
    texts = list(messages())
    page = (ROOT / "docs/troubleshooting.md").read_text()
    keys = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(keys) > 30
    assert [key for key in keys if not is_message(key, texts)] == []
    assert [line for line in page.splitlines() if line.startswith("### ")] == [
        f"### `{key}`" for key in keys
    ]
    assert not is_message("complete: the … sources are not the … tensors that were lost", texts)


# ---- what pages point to -------------------------------------------------------------------------

SHOWN = re.compile(r'\[(?:cpu|gpu|[\w ]+)\]\(\.\./(tests/[\w/]+\.py) "(test_\w+)"\)')


def functions_of(path: Path) -> set[str]:
    return {
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    }


def test_features_are_shown_by_tests_that_exist() -> None:
    page = (ROOT / "docs/features.md").read_text()
    shown = SHOWN.findall(page)
    assert len(shown) == page.count("](../tests/") > 50
    missing = [
        (file, name)
        for file, name in shown
        if not (ROOT / file).is_file() or name not in functions_of(ROOT / file)
    ]
    assert missing == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", text)
    gone = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert gone == []


def test_the_api_page_is_current() -> None:
    assert (ROOT / "docs/api.md").read_text() == page(), (
        "docs/api.md is out of date: python -m ulysses_ops.tools.api_page"
    )


FIGURE = re.compile(r"\d[\d,.]* ?(us|ms|GB/s|TFLOP/s|microseconds)\b")


def figures_of(text: str) -> list[str]:
    """Lines that quote a time or a rate, outside the tables that tools make from results."""
    places = find_places(text)
    edges = zip([0, *(p.end for p in places)], [*(p.begin for p in places), None], strict=True)
    prose = "".join(text[begin:end] for begin, end in edges)
    return [line for line in prose.splitlines() if FIGURE.search(line)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_figure_is_quoted_that_no_tool_has_written(path: Path) -> None:
    """Design notes, a folder further down, may tell what was tried."""
    assert figures_of(path.read_text()) == []


def test_control_a_quoted_figure_is_seen() -> None:
    assert figures_of("It takes 5.2 us.") == ["It takes 5.2 us."]
    assert figures_of("<!-- table:costs -->\n| 5.2 us |\n<!-- /table -->\n") == []
