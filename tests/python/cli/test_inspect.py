"""`tandem inspect`: one rank of a group, and mistakes in its options."""

import json

import pytest

from tandem.cli import main


def test_a_rank_of_a_group_holds_its_share_of_the_heads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "demo", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert main(["inspect", "demo", "--json", "--shard", "4,2", "--kv-dtype", "float32"]) == 0
    rank = json.loads(capsys.readouterr().out)
    assert (rank["shard_size"], rank["shard_rank"], rank["sections"][0]["first_head"]) == (4, 2, 2)
    # Twice the bytes a number, a quarter of the heads.
    assert 2 * rank["sections"][0]["num_bytes"] == whole["sections"][0]["num_bytes"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--shard", "3,0"], "3"),
        (["--shard", "4,4"], "4"),
        (["--kv-dtype", "int8"], "kv_dtype is 'int8'; allowed are bfloat16"),
    ],
)
def test_an_option_that_does_not_fit_is_one_line_and_exit_code_2(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "demo", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert named in printed.err


@pytest.mark.parametrize("text", ["4", "4,", "a,0", "4,-1", "4,0,0"])
def test_a_shard_that_is_no_pair_of_numbers_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "demo", "--shard", text])
    assert ended.value.code == 2
    assert "is not SIZE,RANK" in capsys.readouterr().err
