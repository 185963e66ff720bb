"""Methods by name: the records that the command line, the tests and the documentation go by."""

import inspect

import pytest

from pliant import methods
from tests import zoo


def test_records_describe_their_classes() -> None:
    for name in methods.names():
        record = methods.info(name)
        assert record.name == record.cls.name == name
        assert record.summary
        assert record.paper
        settings = methods.options(name)
        for tunable in record.tunables:
            required = settings[tunable.name] is inspect.Parameter.empty
            assert tunable.default == (None if required else settings[tunable.name]), (name, tunable.name)
            high = float("inf") if tunable.high is None else tunable.high
            if tunable.high is not None:
                methods.create(name, zoo.build("mlp"), example=zoo.batch("mlp")[0], **{tunable.name: tunable.high})
            assert all(tunable.low <= value <= high for value in tunable.sweep), (name, tunable.name)


def test_unknown_method_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"no method 'swt'; did you mean 'swr'\? Allowed: swr, l2"):
        methods.create("swt", zoo.build("mlp"))


def test_a_setting_without_a_default_must_be_given() -> None:
    with pytest.raises(ValueError, match=r"method 'feature_rank': give lam; no value is safe"):
        methods.create("feature_rank", zoo.build("mlp"), example=zoo.batch("mlp")[0])


def test_groups_hold_every_method_once_and_those_to_be_told_come_last() -> None:
    groups = methods.by_timing()
    assert sorted(info.name for group in groups.values() for info in group) == sorted(methods.names())
    assert all(info.acts == acts for acts, group in groups.items() for info in group)
    told = [any(info.needs_telling for info in group) for group in groups.values()]
    assert told == sorted(told)
    assert [info.name for info in groups["on new data"] if not info.needs_telling] == []
