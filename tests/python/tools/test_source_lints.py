import pytest

from tools.lint import assertions, file_length, hygiene, include_direction, swallowed, words


def cpp_file(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "tandem/sched/plan.h",
            '#include <vector>\n#include "tandem/kv/page_pool.h"\n#include "tandem/sched/seat.h"\n',
        ),
        ("tandem/base/check.h", '#include "tandem/base/strong_id.h"\n'),
        ("bindings/kv.cpp", "#include <nanobind/nanobind.h>\n"),
    ],
)
def test_includes_along_the_direction_pass(tmp_path, name, text):
    assert include_direction.faults(cpp_file(tmp_path, name, text), tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("tandem/kv/pool.h", '#include "tandem/sched/plan.h"\n', "kv may use base, layout"),
        ("tandem/transfer/plan.h", '  #  include "tandem/sched/plan.h"\n', "transfer may use"),
        ("tandem/base/check.h", '#include "tandem/kv/pool.h"\n', "nothing else"),
        ("tandem/cpu/gemv.cpp", "#include <torch/torch.h>\n", "cpp/bindings"),
        ("tandem/cpu/gemv.cpp", "#include <Python.h>\n", "cpp/bindings"),
        ("tandem/layout/view.cpp", "#include <cuda_runtime.h>\n", "cpp/bindings"),
        ("tandem/layout/view.cpp", '#include "../base/check.h"\n', "root of cpp"),
        ("tandem/network/socket.h", "", "no place"),
    ],
)
def test_an_include_against_the_direction_is_named(tmp_path, name, text, word):
    (fault,) = include_direction.faults(cpp_file(tmp_path, name, text), tmp_path)
    assert word in fault


def test_a_file_of_600_lines_passes_and_one_of_601_does_not(tmp_path):
    path = tmp_path / "long.py"
    path.write_text("x = 1\n" * 600)
    assert file_length.faults(path) == []
    path.write_text("x = 1\n" * 601)
    assert "601 lines" in file_length.faults(path)[0]


@pytest.mark.parametrize(
    "line",
    ["# TO" + "DO: later", "// FIX" + "ME", "open('/" + "home/ada/x')"],
)
def test_words_that_do_not_belong_are_found_with_their_line(tmp_path, line):
    path = tmp_path / "module.py"
    path.write_text(f"x = 1\n{line}\n")
    (fault,) = words.faults(path)
    assert fault.startswith(f"{path}:2:")


def test_words_that_only_look_alike_pass(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("todo_list = homework / root\nurl = 'https://example.org/home/x'\n")
    assert words.faults(path) == []


@pytest.mark.parametrize("handler", ["except: pass", "except Exception: pass", "except BaseException:\n    ..."])
def test_a_handler_that_swallows_every_error_is_found(tmp_path, handler):
    path = tmp_path / "module.py"
    path.write_text(f"try:\n    f()\n{handler}\n")
    assert swallowed.faults(path) == [f"{path}:3: an except that swallows every error"]


@pytest.mark.parametrize(
    "handler", ["except KeyError: pass", "except Exception as e: log(e)", "except BaseException: raise"]
)
def test_a_handler_that_names_its_error_or_acts_on_it_passes(tmp_path, handler):
    path = tmp_path / "module.py"
    path.write_text(f"try:\n    f()\n{handler}\n")
    assert swallowed.faults(path) == []


def test_a_test_that_asserts_nothing_is_found(tmp_path):
    path = tmp_path / "test_module.py"
    path.write_text("def test_runs():\n    compute()\n\ndef helper():\n    compute()\n")
    assert assertions.faults(path) == [f"{path}:1: test_runs asserts nothing"]


@pytest.mark.parametrize(
    "body", ["assert x", "with pytest.raises(ValueError): f()", "check_equal(x)", "npt.assert_equal(x)"]
)
def test_a_test_that_can_fail_passes(tmp_path, body):
    path = tmp_path / "test_module.py"
    path.write_text(f"def test_it():\n    {body}\n")
    assert assertions.faults(path) == []


def test_a_helper_of_the_same_file_counts_only_if_it_can_fail(tmp_path):
    path = tmp_path / "test_module.py"
    good = "class World:\n    def same(self): assert x\n\ndef run(w): w.same()\n\n"
    path.write_text(good + "def test_good():\n    run(World())\n\ndef idle(): pass\n\ndef test_bad():\n    idle()\n")
    (fault,) = assertions.faults(path)
    assert "test_bad" in fault


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"a\r\nb\n", "Windows"),
        (b"a", "no newline"),
        (b"a \n", "blanks"),
        (b"<<<<<<< HEAD\na\n", "merge"),
        (b"a" * ((1 << 20) + 1), "more than"),
    ],
)
def test_untidy_files_are_named(tmp_path, data, word):
    path = tmp_path / "file.txt"
    path.write_bytes(data)
    assert any(word in fault for fault in hygiene.faults(path, "file.txt"))


def test_tidy_empty_and_binary_files_pass(tmp_path):
    path = tmp_path / "file.txt"
    for data in (b"", b"a\nb\n", b"\xff\xfe\x00"):
        path.write_bytes(data)
        assert hygiene.faults(path, "file.txt") == []
