"""Checkpoints and weight files as readers that are not ours see them: plain h5py, and safetensors.

checkpoint_sample (tests/conformance_checkpoint/sample.cc) writes them; content follows a formula, so every number is
known here. Needs STRATA_BUILD_DIR (the build tree), numpy and h5py; the safetensors tests need safetensors.
"""
import json
import os
import pathlib
import shutil
import subprocess

import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")
h5py = pytest.importorskip("h5py", reason="h5py is not installed")

WIDTH = {"BF16": 2, "F16": 2, "F32": 4}


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    build = os.environ.get("STRATA_BUILD_DIR")
    if not build:
        pytest.skip("STRATA_BUILD_DIR is not set")
    program = pathlib.Path(build) / "tests" / "checkpoint_sample"
    if not program.exists():
        pytest.skip("checkpoint_sample was not built")
    directory = tmp_path_factory.mktemp("sample")
    subprocess.run([program, directory], check=True, timeout=60)
    return directory


def describe(index):
    return json.loads(index["strata/json"][...].tobytes())


def formula(description, param, array):
    """The bits of a param's array, as unsigned integers of its shape (Model::bits in model.cc)."""
    if "alias_of" in param:
        param = next(p for p in description["params"] if p["name"] == param["alias_of"])
    segment = param["segment"]
    arrays = description["segments"][segment]["arrays"]
    k = next(i for i, a in enumerate(arrays) if a["name"] == array)
    width = WIDTH[arrays[k]["dtype"]]
    element = np.arange(int(np.prod(param["shape"])), dtype=np.uint64) + np.uint64(param["offset"])
    bits = element * np.uint64(2654435761) + np.uint64(segment * 977 + k * 131)
    return (bits & np.uint64((1 << 8 * width) - 1)).astype(f"u{width}").reshape(param["shape"])


def assert_shown(values, dtype, right):
    """What h5py returns (float32 for bf16, exactly; float16; float32) has the bits `right`; a NaN is some NaN."""
    assert values.dtype == (np.float16 if dtype == "F16" else np.float32) and np.shape(values) == np.shape(right)
    values, right = np.reshape(values, -1), np.reshape(right, -1)
    wide = right.astype("u4") << 16 if dtype == "BF16" else right  # bf16 is the upper half of a float32
    nan = np.isnan(wide.view(values.dtype))
    np.testing.assert_array_equal(np.isnan(values), nan)
    np.testing.assert_array_equal(values.view(wide.dtype)[~nan], wide[~nan])


def raw_bits(dataset, dtype):
    """The stored bits themselves, read without any conversion."""
    out = np.empty(dataset.shape, f"u{WIDTH[dtype]}")
    if out.size:
        dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, out, mtype=dataset.id.get_type())
    return out


def each_array(description):
    for param in description["params"]:
        owner = param
        if "alias_of" in param:
            owner = next(p for p in description["params"] if p["name"] == param["alias_of"])
        for array in description["segments"][owner["segment"]]["arrays"]:
            yield param, array["name"], array["dtype"]


def check_index(path):
    with h5py.File(path, "r") as index:
        description = describe(index)
        for param, array, dtype in each_array(description):
            dataset = index[f"{array}/{param['path']}"]
            assert dataset.shape == tuple(param["shape"])
            assert dataset.attrs["dtype"].decode() == dtype
            right = formula(description, param, array)
            assert_shown(dataset[...], dtype, right)
            np.testing.assert_array_equal(raw_bits(dataset, dtype), right)
        return description


def test_index_shows_every_tensor(sample):
    description = check_index(sample / "t" / "index.h5")
    assert len(description["params"]) == 16
    assert description["world"] == 2


def test_index_works_after_moving_and_from_elsewhere(sample, tmp_path, monkeypatch):
    shutil.copytree(sample / "t", tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(sample / "t" / "rank00000.h5", tmp_path / "elsewhere" / "rank00001.h5")  # a decoy
    monkeypatch.chdir(tmp_path / "elsewhere")
    check_index(pathlib.Path("..") / "moved" / "index.h5")


def test_all_bf16_patterns_are_there(sample):
    with h5py.File(sample / "t" / "index.h5", "r") as index:
        bits = raw_bits(index["weight/all"], "BF16")
    assert len(np.unique(bits)) == 65536


def test_missing_rank_file_shows_nan(sample, tmp_path):
    shutil.copytree(sample / "t", tmp_path / "t")
    (tmp_path / "t" / "rank00001.h5").unlink()
    with h5py.File(tmp_path / "t" / "index.h5", "r") as index:
        description = describe(index)
        for name in ("wide", "all", "cube"):  # float32, bf16, and one that is cut inside a row of a third dimension
            param = next(p for p in description["params"] if p["name"] == name)
            offset, count = description["segments"][param["segment"]]["owned"][0]
            here = max(0, min(int(np.prod(param["shape"])), offset + count - param["offset"]))
            values = index["weight/" + param["path"]][...].reshape(-1)
            assert_shown(values[:here], param["dtype"], formula(description, param, "weight").reshape(-1)[:here])
            assert np.isnan(values[here:]).all()
            assert 0 < here < values.size


def test_meta(sample):
    with h5py.File(sample / "t" / "index.h5", "r") as index:
        meta = {m["key"]: m for m in describe(index)["meta"]}
    assert meta["step"]["type"] == "int" and meta["step"]["value"] == 1 << 60
    assert meta["lr"]["type"] == "float" and meta["lr"]["value"] == 1e-3
    assert meta["resumed"]["value"] is True
    assert meta["manifest"]["value"] == '[plugin]\nx = "\u00fc"\n'


def test_weight_file_with_h5py(sample):
    path = sample / "weights.safetensors"
    with h5py.File(sample / "t" / "index.h5", "r") as index, h5py.File(path, "r") as weights:
        description = describe(index)
        for param in description["params"]:
            dataset, right = weights[param["path"]], formula(description, param, "weight")
            assert dataset.shape == tuple(param["shape"])
            assert_shown(dataset[...], param["dtype"], right)
            np.testing.assert_array_equal(raw_bits(dataset, param["dtype"]), right)
            if right.size:
                raw = np.fromfile(path, right.dtype, right.size, offset=dataset.id.get_offset())
                np.testing.assert_array_equal(raw.reshape(right.shape), right)
        assert weights["tied%_"].id.get_offset() == weights["a%_"].id.get_offset()


def test_weight_file_with_safetensors(sample):
    safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
    with h5py.File(sample / "t" / "index.h5", "r") as index:
        description = describe(index)
    path = str(sample / "weights.safetensors")
    raw = dict(safetensors.deserialize((sample / "weights.safetensors").read_bytes()))
    with safetensors.safe_open(path, "np") as opened:
        metadata = opened.metadata()
        assert set(opened.keys()) == set(raw)
    for param in description["params"]:
        if "alias_of" in param:
            assert metadata[param["name"]] == param["alias_of"]
            continue
        tensor, right = raw[param["name"]], formula(description, param, "weight")
        assert tensor["dtype"] == param["dtype"] and tensor["shape"] == param["shape"]
        np.testing.assert_array_equal(np.frombuffer(tensor["data"], right.dtype).reshape(right.shape), right)


def test_hdf5_tools_read_the_files(sample):
    if not shutil.which("h5dump"):
        pytest.skip("h5dump is not installed")
    for path in (sample / "t" / "index.h5", sample / "t" / "rank00000.h5", sample / "weights.safetensors"):
        subprocess.run(["h5dump", "-H", path], check=True, timeout=60, stdout=subprocess.DEVNULL)
