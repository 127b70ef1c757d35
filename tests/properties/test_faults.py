"""Every fault of `support/faults.py` is noticed: by the plain models, or by the test that the fault names."""

import pytest
from checkout import TESTS
from faults import FAULTS, Comparison, copy_checkout, find_file, injected, run_tests


# Draws that notice every fault of the models.
NOTICING = 150
WITH_TEST = [fault for fault in FAULTS if fault.test]
each = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.anchor)


@each
def test_faults_have_a_place(fault):
    """Move a fault with its code or its test, or find another one for code that is gone."""
    compile(find_file(fault).read_text("utf-8").replace(fault.text, fault.faulty), fault.anchor, "exec")
    if fault.test:
        file, _, name = fault.test.partition("::")
        assert f"def {name.partition('[')[0]}" in (TESTS / file).read_text("utf-8")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A copy of the checkout in which every test passes."""
    copied = copy_checkout(tmp_path_factory.mktemp("copy"))
    ended, printed = run_tests(copied, *{fault.test for fault in WITH_TEST})
    assert ended == pytest.ExitCode.OK, printed
    return copied


@pytest.mark.slow
def test_plain_models_notice_faults(root):
    comparison = Comparison(root, NOTICING)
    assert not comparison.notices(None), "the copy without a fault differs"
    assert not [fault for fault in FAULTS if not fault.test and not comparison.notices(fault)]


@pytest.mark.slow
@pytest.mark.parametrize("fault", WITH_TEST, ids=lambda fault: fault.anchor)
def test_tests_notice_faults(fault, root):
    with injected(fault, root):
        ended, printed = run_tests(root, fault.test)
    assert ended == pytest.ExitCode.TESTS_FAILED, printed
