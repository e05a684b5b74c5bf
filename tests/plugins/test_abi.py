"""The digest that bundles carry: all operators of the library, and nothing that a run could change."""

from dataclasses import replace

import pytest

from plugins import abi
from plugins.spec import DOMAIN


def test_operators_of_all_folders() -> None:
    assert [(operator.domain, operator.op_type) for operator in abi.OPERATORS] == [
        (DOMAIN, "PagedAttention"),
        (DOMAIN, "AddRmsNorm"),
        (DOMAIN, "SwiGlu"),
        (DOMAIN, "QuantizeRows"),
        (DOMAIN, "AddRmsNormQuantize"),
        (DOMAIN, "SwiGluQuantize"),
        (DOMAIN, "Int8MatMul"),
        (DOMAIN, "WeightMatMul"),
        (DOMAIN, "Linear"),
        (DOMAIN, "LinearSwiGlu"),
        (DOMAIN, "QuantLinear"),
        (DOMAIN, "QuantLinearSwiGlu"),
        (DOMAIN, "Sample"),
        (DOMAIN, "FeedTokens"),
    ]
    assert abi.abi_hash() == abi.abi_hash()


@pytest.mark.parametrize("index", range(len(abi.OPERATORS)))
def test_any_change_of_any_operator_is_another_abi(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = abi.OPERATORS[index]
    changes = [
        replace(operator, inputs=operator.inputs[:-1]),
        replace(operator, outputs=(*operator.outputs, operator.inputs[0])),
        replace(operator, attributes={**operator.attributes, "more": 1}),
        replace(operator, since_version=2),
    ]
    hashes = {abi.abi_hash()}
    for changed in changes:
        operators = (*abi.OPERATORS[:index], changed, *abi.OPERATORS[index + 1 :])
        with monkeypatch.context() as patch:
            patch.setattr(abi, "OPERATORS", operators)
            hashes.add(abi.abi_hash())
    assert len(hashes) == 5
