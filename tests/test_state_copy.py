"""Every case on every implementation, every byte against the oracle."""

import pytest
from cases import CASES, EVERY_CASE, IMPLEMENTATIONS, Case, changed_bytes, check_case


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("case", "layout"), EVERY_CASE)
def test_every_byte_is_as_the_oracle_says(implementation: str, case: Case, layout: str) -> None:
    check_case(implementation, case, layout)


def test_cases_that_should_move_states_do() -> None:
    still = {"no_live_request", "negative_num_reqs"}
    moved = {case.name for case in CASES if all(changed_bytes(case, layout) for layout in case.layouts)}
    assert moved == {case.name for case in CASES} - still
