import pytest

from tools.lint import commit_message

SIGN_OFF = "\n\nSigned-off-by: Ada Byron <ada@example.org>\n"


def test_a_well_formed_message_has_no_faults():
    assert commit_message.faults("[kv][feat] Evict the least recently used leaf first" + SIGN_OFF) == []


@pytest.mark.parametrize("subject", ["Merge branch 'main' into topic", 'Revert "[kv][feat] Evict leaves"'])
def test_subjects_that_git_writes_need_only_a_sign_off(subject):
    assert commit_message.faults(subject + SIGN_OFF) == []
    assert len(commit_message.faults(subject)) == 1


@pytest.mark.parametrize(
    ("subject", "word"),
    [
        ("Evict leaves", "form"),
        ("[kv] Evict leaves", "form"),
        ("[kv][feat]Evict leaves", "form"),
        ("[cache][feat] Evict leaves", "area 'cache'"),
        ("[kv][feature] Evict leaves", "type 'feature'"),
        ("[kv][feat] Evict leaves.", "full stop"),
        ("[kv][feat] Evict " + "very " * 20 + "old leaves", "characters"),
    ],
)
def test_a_subject_of_another_form_is_refused_with_its_reason(subject, word):
    (fault,) = commit_message.faults(subject + SIGN_OFF)
    assert word in fault


@pytest.mark.parametrize("body", ["", "\n\nSigned-off-by: Ada Byron\n", "\n\nSigned-off-by: <ada@example.org>\n"])
def test_a_message_without_a_whole_sign_off_is_refused(body):
    (fault,) = commit_message.faults("[kv][feat] Evict leaves" + body)
    assert "sign-off" in fault


def test_a_sign_off_in_a_comment_does_not_count():
    message = "[kv][feat] Evict leaves\n# Signed-off-by: Ada Byron <ada@example.org>\n"
    assert any("sign-off" in fault for fault in commit_message.faults(message))


def test_the_hook_exits_with_one_for_a_bad_message_and_zero_for_a_good_one(tmp_path, capsys):
    file = tmp_path / "COMMIT_EDITMSG"
    file.write_text("oops")
    assert commit_message.main([str(file)]) == 1
    assert "commit message:" in capsys.readouterr().err
    file.write_text("[docs][chore] Name the tests" + SIGN_OFF)
    assert commit_message.main([str(file)]) == 0
