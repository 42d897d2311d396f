"""The privacy record: round trips, and no edited, damaged or mixed-up file gets through."""

import dataclasses
import json
import math

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psa_utils import accounting, describe, record
from psa_utils.record import Certificate, Claim, Earlier, Model, PrivacyRecord, RecordError
from psa_utils.vectors import SteeringVectors
from tests.releases import example, small_disk, vectors_of


def edited(valid: PrivacyRecord, **changes) -> dict:
    """The record's JSON with fields changed by hand."""
    return {**valid.to_json(), **changes}


def test_the_schema_is_a_valid_draft_2020_12_schema_that_explains_every_field():
    schema = record.validator().schema
    jsonschema.Draft202012Validator.check_schema(schema)
    fields = {field.name for field in dataclasses.fields(PrivacyRecord)} | {"schema"}
    assert set(schema["properties"]) == set(schema["required"]) == fields
    assert all("description" in rule for name, rule in schema["properties"].items() if name != "schema")


@settings(deadline=None)
@given(
    n=st.integers(2, 10**6),
    sigma=st.floats(1e-4, 10),
    layers=st.sets(st.integers(0, 80), min_size=1, max_size=6).map(sorted).map(tuple),
    bounded=st.sampled_from(["per-layer", "joint"]),
)
def test_any_consistent_record_survives_its_own_text(n, sigma, layers, bounded):
    made = example(n=n, sigma=sigma, layers=layers, bounded=bounded)
    assert PrivacyRecord.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize("variant", ["release", "demonstration", "unit-norm", "earlier"])
def test_variants_survive_the_file(tmp_path, variant):
    changes = {
        "release": {},
        "demonstration": {"seed": 7, "certificate": None},
        "unit-norm": {"norm_rule": "unit-norm", "clip": None, "clip_source": None},
        "earlier": {"also_released": (Earlier("spring", 0.3), Earlier("summer", 0.4))},
    }[variant]
    made = example(**changes)
    vectors_of(made).save(tmp_path / "v.safetensors")
    vectors, again = record.read(tmp_path / "v.safetensors")
    assert again == made
    assert vectors.digest() == made.digest
    assert again.seeded == (variant == "demonstration")


def test_claims_are_exact_and_include_the_users_own_delta():
    mu = record.release_mu(n=1000, sigma=0.02, layers=5, bounded="per-layer")
    assert math.isclose(mu, math.sqrt(5) * 2 / (1000 * 0.02))
    found = {claim.delta: claim.epsilon for claim in record.claims(mu, 1000, 1e-6)}
    assert set(found) == {1 / 1000, 1e-5, 1e-6}
    for delta, epsilon in found.items():
        assert math.isclose(accounting.gaussian_delta(mu, epsilon), delta, rel_tol=1e-6)
    assert len(record.claims(mu, 100_000)) == 1, "1/n and 1e-5 are one delta there"


def test_releases_from_the_same_data_compose():
    made = example(also_released=(Earlier("spring", 3.0), Earlier("summer", 4.0)))
    assert math.isclose(made.total_mu, math.hypot(made.mu, 5.0))


def test_model_knows_a_digest_from_a_commit():
    assert Model.of("m", "0" * 64, "llama") == Model("m", "llama", None, "0" * 64)
    assert Model.of("m", "0" * 40, "llama") == Model("m", "llama", "0" * 40, None)


EDITS = {
    "version": ({"schema": "psa-privacy-record/2"}, "schema='psa-privacy-record/2', this version reads"),
    "unknown field": ({"trusted": True}, "'trusted' was unexpected"),
    "unit": ({"unit": "hospital"}, r"unit='hospital' is refused: .*whose data one replacement changes.*get the file"),
    "relation": ({"relation": "add-remove"}, "relation='add-remove'"),
    "n as text": ({"n": "1000"}, "n='1000' is refused"),
    "n true": ({"n": True}, "n=True is refused"),
    "n one": ({"n": 1}, "n=1 is refused"),
    "n raised": ({"n": 100_000}, "mu=.* does not follow from n=100000"),
    "sigma zero": ({"sigma": 0}, "sigma=0 is refused"),
    "sigma raised": ({"sigma": 0.2}, "mu=.* does not follow"),
    "sigma infinite": ({"sigma": math.inf}, "sigma=inf is not finite"),
    "mu lowered": ({"mu": 0.01}, "mu=0.01 does not follow"),
    "mu not a number": ({"mu": math.nan}, "mu=nan is not finite"),
    "bounded": ({"bounded": "joint", "clip": [1.0]}, "mu=.* does not follow .* joint"),
    "epsilon lowered": (
        {"epsilons": [{"epsilon": 0.1, "delta": 1e-3}, {"epsilon": 0.1, "delta": 1e-5}]},
        "epsilon=0.1",
    ),
    "epsilon missing": ({"epsilons": [{"delta": 1e-5}]}, r"epsilons\[0\] is refused: 'epsilon' is a required"),
    "no strict delta": ({"epsilons": [{"epsilon": 0.0, "delta": 0.5}]}, "lacks delta=1/n"),
    "epsilon negative": ({"epsilons": [{"epsilon": -1, "delta": 1e-5}]}, r"epsilons\[0\].epsilon=-1 is refused"),
    "delta one": ({"epsilons": [{"epsilon": 1, "delta": 1}]}, r"epsilons\[0\].delta=1 is refused"),
    "clip for unit norm": ({"norm_rule": "unit-norm"}, "clip=.* has no C"),
    "clip too short": ({"clip": [1.0]}, r"clip=\(1.0,\) is not the 2 finite"),
    "clip infinite": ({"clip": [1.0, math.inf]}, "clip=.* is not the 2 finite"),
    "clip unexplained": ({"clip_source": None}, "clip_source=None does not say where C came from"),
    "layers descending": ({"layers": [2, 1]}, "layers=.* is not ascending"),
    "layers repeated": ({"layers": [1, 1]}, "layers=.* is refused"),
    "layers none": ({"layers": []}, "layers=.* is refused"),
    "rho lowered": ({"certificate": {"rho": 1e-6, "library": "opendp", "version": "0.16.0"}}, "certifies less"),
    "no certificate": ({"certificate": None}, "certificate=None does not go with seed=None"),
    "release with a seed": ({"seed": 3}, "certificate=.* does not go with seed=3"),
    "sampler": ({"sampler": ""}, "sampler='' is refused"),
    "no weights named": (
        {"model": {"id": "m", "architecture": "llama", "revision": None, "digest": None}},
        "model=.* has neither revision nor digest",
    ),
    "model digest": (
        {"model": {"id": "m", "architecture": "llama", "revision": None, "digest": "abc"}},
        "model.digest='abc' is refused",
    ),
    "format": ({"format": "essay"}, "format='essay' is refused"),
    "multiplier": ({"multiplier": math.inf}, "multiplier=inf is not finite"),
    "earlier mu": ({"also_released": [{"what": "x", "mu": 0}]}, r"also_released\[0\].mu=0 is refused"),
    "digest": ({"digest": "0"}, "digest='0' is refused"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_record_edited_by_hand_is_refused_with_field_value_and_cure(name):
    changes, message = EDITS[name]
    with pytest.raises(RecordError, match=message) as refused:
        PrivacyRecord.from_json(edited(example(), **changes))
    assert "get the file again" in str(refused.value) or "use the software that wrote it" in str(refused.value)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(PrivacyRecord)])
def test_every_field_is_required(field):
    raw = example().to_json()
    del raw[field]
    with pytest.raises(RecordError, match=f"'{field}' is a required property"):
        PrivacyRecord.from_json(raw)


@settings(deadline=None)
@given(
    field=st.sampled_from(["n", "sigma", "mu"]),
    factor=st.floats(0.05, 20).filter(lambda f: abs(math.log(f)) > 0.01),
)
def test_no_single_number_can_be_moved(field, factor):
    raw = example().to_json()
    moved = raw[field] * factor
    raw[field] = max(2, round(moved)) if field == "n" else moved
    if raw[field] != example().to_json()[field]:
        with pytest.raises(RecordError):
            PrivacyRecord.from_json(raw)


def test_a_consistently_understated_epsilon_is_refused():
    """Lowering mu and every epsilon together still contradicts n, sigma and layers."""
    made = example()
    mu = made.mu / 2
    changes = {"mu": mu, "epsilons": [dataclasses.asdict(c) for c in record.claims(mu, made.n)]}
    with pytest.raises(RecordError, match="does not follow from n"):
        PrivacyRecord.from_json(edited(made, **changes))


def test_hiding_that_a_demonstration_was_seeded_is_refused():
    with pytest.raises(RecordError, match="certificate=None does not go with seed=None"):
        PrivacyRecord.from_json(edited(example(seed=3, certificate=None), seed=None))


def test_the_class_itself_refuses_what_the_reader_refuses():
    with pytest.raises(RecordError, match="epsilons"):
        example(epsilons=(Claim(0.1, 1e-5),))
    with pytest.raises(RecordError, match="certificate"):
        example(certificate=Certificate(1e-9, "opendp", "0.16.0"))


def test_swapped_or_changed_tensors_are_refused_by_every_reader(tmp_path):
    made, path = example(), tmp_path / "v.safetensors"
    honest = vectors_of(made)
    changed = honest.values.copy()
    changed[0, 0] = np.nextafter(changed[0, 0], np.float32(9))
    for values in (honest.values[::-1], changed, -honest.values):
        SteeringVectors(honest.layers, values, honest.record).save(path)
        for read in (record.read, SteeringVectors.load):
            with pytest.raises(ValueError, match=r"not those of its record \(digest differs\); get the file again"):
                read(path)


def test_layers_renamed_in_the_record_are_refused(tmp_path):
    made, path = example(), tmp_path / "v.safetensors"
    SteeringVectors(made.layers, vectors_of(made).values, edited(made, layers=[1, 3])).save(path)
    with pytest.raises(RecordError, match=r"v.safetensors: .*layers=\(1, 3\), the file holds \(1, 2\)"):
        record.read(path)


def test_research_files_have_no_privacy_record(tmp_path):
    path = tmp_path / "v.safetensors"
    SteeringVectors((1,), np.ones((1, 4)), {"method": "PSA", "mu": 0.1}).save(path)
    vectors, none = record.read(path)
    assert none is None
    text = describe.describe_file(vectors, none)
    assert text.startswith("NO PRIVACY RECORD")
    assert "PSA" in text


def test_digest_does_not_depend_on_the_order_of_the_layers():
    values = np.arange(8.0).reshape(2, 4)
    assert SteeringVectors((3, 1), values).digest() == SteeringVectors((1, 3), values[::-1]).digest()
    assert SteeringVectors((3, 1), values).digest() != SteeringVectors((1, 3), values).digest()


def test_the_description_says_everything_that_matters():
    made = example(also_released=(Earlier("spring", 0.3),), unit="person", multiplier=2.5)
    text = " ".join(describe.describe(made).split())
    shown = (
        "(0.3, 0.001)-DP, (0.497, 1e-05)-DP", "0.1415-GDP", "0.01-zCDP certified by opendp 0.16.0",
        "one person of n = 1000", "replace-one", "spring (mu = 0.3)", "in total 0.3317-GDP", made.sampler, "0.02",
        "C = 3.5, 4.5 in every layer", "C from median norm of public pairs", made.accounting, made.estimator,
        "tiny-llama (llama)", made.model.digest, "text", "2.5", made.software, made.digest,
    )  # fmt: skip
    assert [part for part in shown if part not in text] == []
    assert "DEMONSTRATION" not in text


@settings(deadline=None)
@given(epsilon_like=st.floats(1e-6, 1e3))
def test_printed_guarantees_never_claim_more_than_holds(epsilon_like):
    printed = float(describe._up(epsilon_like))
    assert epsilon_like * (1 - 1e-8) <= printed <= epsilon_like * 1.0011


def test_the_description_of_a_demonstration_begins_with_the_warning():
    made = example(seed=7, certificate=None)
    text = describe.describe(made)
    assert text.startswith("DEMONSTRATION")
    assert "protects nobody" in text
    assert "seed 7" in text
    assert "zCDP" not in text


def test_vectors_that_the_disk_does_not_take_leave_the_old_file(tmp_path):
    path = tmp_path / "v.safetensors"
    path.write_text("old")
    with small_disk(), pytest.raises(OSError, match=r"cannot write .*v.safetensors .*nothing was kept"):
        vectors_of(example()).save(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
