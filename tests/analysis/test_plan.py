"""The plan of a run: its memory is the run's, its operations are those of closed forms."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from t5x_fwdloss.analysis import Eigenpairs, Trace
from t5x_fwdloss.analysis.plan import compiled, fits, plan, start, words
from t5x_fwdloss.curvature.vectors import layout

from . import plan_program, runs, toy

WITHIN = 0.15


@pytest.fixture(scope="module")
def bytes_found(repository):
    """By number of devices and measurement, the bytes planned and seen in a run."""
    flags = "--xla_force_host_platform_device_count=9"
    done = subprocess.run(
        [sys.executable, "-m", "tests.analysis.plan_program"],
        cwd=repository,
        env=os.environ | {"PYTHONPATH": str(repository), "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("devices", ["1", "8"])
def test_the_memory_is_what_a_run_takes(bytes_found, devices):
    found = bytes_found[devices]
    names = [m.name for m in plan_program.measurements()]
    assert list(found) == ["checks", *names]
    for name, sizes in found.items():
        assert sizes["planned"] == pytest.approx(sizes["seen"], rel=WITHIN), name
        # More than this it may not take, or the run ends in the middle.
        assert sizes["planned"] >= 0.99 * sizes["seen"], name


def test_eight_devices_take_less_each(bytes_found):
    for name, sizes in bytes_found["8"].items():
        assert sizes["planned"] < 0.5 * bytes_found["1"][name]["planned"]


def test_operations_in_a_loop_count_as_often_as_it_runs():
    size, length = 24, 7

    @jax.jit
    def function(matrices, x):
        x, _ = jax.lax.scan(lambda x, a: (a @ x, None), x, matrices)
        return x @ x

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    found = compiled.size_of(function, shape(length, size, size), shape(size, size))
    assert found.flops == pytest.approx(2 * size**3 * (length + 1), rel=0.02)
    assert found.output == 4 * size**2


def planned(**changes):
    """A toy run that is to be planned, on one device."""
    given = {
        "objective": runs.objective(toy.batches(12)),
        "params": layout.described(toy.parameters()),
        "measurements": [Trace(num_probes=64, block_size=64)],
        "num_batches": 4,
        "memory_budget": 2**30,
    }
    return plan.Planned(**given | changes)


def total(**changes):
    return fits.largest(plan.rows(planned(**changes))).total


def said(run):
    return fits.refusal(run, plan.rows(run))


def test_a_run_that_fits_is_not_rejected():
    for limit in (None, total()):
        assert said(planned(device_bytes=limit)) is None


def test_a_run_that_does_not_fit_is_rejected_with_sizes_and_one_setting():
    least = total(measurements=[Trace(num_probes=64, block_size=1)])
    assert least < min(total(memory_budget=0), total())
    found = said(planned(device_bytes=least))
    assert f"hessian_trace takes {words.size(total())} per device" in found
    assert f"fit the {words.size(least)} of a device" in found
    assert f"with Trace.block_size = 1 it takes {words.size(least)}." in found


def test_the_setting_that_costs_least_time_is_named_first():
    found = said(planned(device_bytes=total() - 1))
    budget = int(found.split("MEMORY_BUDGET = ")[1].split()[0])
    assert budget > 0
    assert said(planned(device_bytes=total() - 1, memory_budget=budget)) is None


def test_a_basis_that_does_not_fit_goes_to_the_host_or_is_restarted_sooner():
    search = Eigenpairs(num_largest=1, num_smallest=0, max_steps=12, max_basis=12)
    whole = planned(measurements=[search], memory_budget=0)
    limit = fits.largest(plan.rows(whole)).total - 1
    assert "with Eigenpairs.basis_on_host = True" in said(
        dataclasses.replace(whole, device_bytes=limit)
    )
    on_host = dataclasses.replace(search, basis_on_host=True)
    row = plan.rows(dataclasses.replace(whole, measurements=[on_host]))[-1]
    vector = compiled.device_bytes(whole.vector)
    assert row.on_host == 10 * vector
    assert row.total == limit + 1 - 10 * vector
    sizes = [other.max_basis for name, other in search.lighter() if "max_basis" in name]
    assert sizes == [8, 5, 4]


def test_batches_that_do_not_fit_are_cut():
    measurements = [Trace(num_probes=2, block_size=1)]
    cut = planned(
        objective=runs.objective(toy.batches(6)),
        measurements=measurements,
        num_batches=8,
        memory_budget=0,
    )
    limit = fits.largest(plan.rows(cut)).total
    run = planned(measurements=measurements, memory_budget=0, device_bytes=limit)
    assert said(run) is not None
    assert "NUM_MICROBATCHES = 2" in said(run)


def test_where_no_setting_is_enough_the_run_is_rejected_all_the_same():
    assert "no single setting is enough" in said(planned(device_bytes=100))


def test_the_table_has_sizes_and_times():
    row = plan.Row("m", 2**20, basis=2**30, num_products=8, flops=36e12)
    _, line = words.table([row], tflops=10.0).splitlines()
    cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
    assert cells[:6] == ["m", "8", "1.0 MiB", "0 B", "1.0 GiB", "0 B"]
    assert cells[6:] == ["1.0 GiB", "0 B", "36", "3.6 s"]


@contextlib.contextmanager
def compilations():
    """The number of functions that JAX compiles, in a list that grows."""
    found = []

    def note(name, _, **__):
        if "backend_compile" in name:
            found.append(name)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield found
    jax.monitoring.unregister_event_duration_listener(note)


def test_a_run_says_at_its_start_what_it_takes_and_compiles_nothing_for_it(tmp_path):
    search = Eigenpairs(num_largest=1, num_smallest=0, max_steps=5, max_basis=5)
    during, lines = [], []
    announce = start.announce

    def counted(*args):
        with compilations() as found:
            announce(*args)
        during.append(len(found))

    def temporary(product, v):
        with compilations() as found:
            size = bytes_of(product, v)
        during.append(len(found))
        return size

    bytes_of = start.MatrixProduct.temporary_bytes
    with (
        mock.patch.object(start, "announce", counted),
        mock.patch.object(start.MatrixProduct, "temporary_bytes", temporary),
        mock.patch.object(start.logging, "info", lambda *x: lines.append(x[0] % x[1:])),
    ):
        assert runs.run(tmp_path, measurements=[search]) == 0
    assert during == [0, 0]
    plans = [line for line in lines if line.startswith("Plan: ")]
    assert "of kept residuals" in plans[0]
    assert plans[1].startswith("Plan: hessian_eigenpairs: at most 6 products, ")
    vector = 4 * (toy.FEATURES + 1) * toy.CLASSES
    assert f"; {words.size(7 * vector)} of vectors per device" in plans[1]


def test_a_run_that_does_not_fit_ends_after_its_checks(tmp_path):
    search = Eigenpairs(num_largest=1, num_smallest=0, max_steps=5)
    with pytest.raises(ValueError, match=r"hessian_eigenpairs must fit the 500 B") as e:
        runs.run(tmp_path, measurements=[search], device_memory=500)
    assert "Eigenpairs.basis_on_host = True" in str(e.value)
    assert not (tmp_path / "results.json").exists()
