"""Files that TensorFlow and Keras write themselves, read by Tenuto, and the reverse; hostile ones are refused."""

from __future__ import annotations

import os
import random
import zipfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import h5py
import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tenuto
from tenuto.errors import CorruptionError, TenutoError
from tenuto.formats import registry
from tenuto.formats.contract import Content


def model():
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    made = keras.Sequential([keras.Input((5,)), keras.layers.Dense(7), keras.layers.BatchNormalization()])
    made.compile("adam", "mse")
    made.fit(np.ones((8, 5), "float32"), np.ones((8, 7), "float32"), verbose=0)
    return made


def values(made):
    return [one.numpy().tobytes() for one in [*made.weights, *made.optimizer.variables]]


def read(path):
    with registry.read(path) as reader:
        return {name: tensor.read() for name, tensor in reader.tensors().items()}, reader


@pytest.mark.parametrize("name", ["a.weights.h5", "a.keras"])
def test_a_file_of_keras_is_read_in_place_and_written_again_as_keras_reads_it(tmp_path, name):
    made = model()
    made.save_weights(tmp_path / name) if name.endswith("h5") else made.save(tmp_path / name)
    arrays, reader = read(tmp_path / name)
    assert reader.format == "keras"
    assert {one.tobytes() for one in arrays.values()} >= {one.numpy().tobytes() for one in made.weights}
    with registry.read(tmp_path / name) as reader:
        registry.named("keras").write(tmp_path / "b.weights.h5", Content(reader.tensors()))
    expected = values(made)
    other = model()
    for one in [*other.weights, *other.optimizer.variables]:
        one.assign(keras.ops.zeros_like(one))
    other.load_weights(tmp_path / "b.weights.h5")
    assert values(other) == expected


def test_ranges_pieces_and_bfloat16_of_an_h5_file(tmp_path):
    plain = np.arange(60, dtype="float32").reshape(6, 10)
    with h5py.File(tmp_path / "a.weights.h5", "w") as file:
        file["layers/whole"] = plain
        file.create_dataset("layers/pieces", data=plain, chunks=(2, 3), compression="gzip")
        half = file.create_dataset("layers/half", data=plain.astype(ml_dtypes.bfloat16))
        half.attrs["dtype"] = "bfloat16"
        file["layers/other_end"] = plain.astype(">f4")
        file["layers/one"] = np.float64(2.5)
    with registry.read(tmp_path / "a.weights.h5") as reader:
        tensors = reader.tensors()
        assert tensors["layers/half"].dtype == "bfloat16"
        for name in ("whole", "pieces", "other_end"):
            out = np.empty(4 * 17, np.uint8)
            tensors[f"layers/{name}"].read_into(out, 4 * 9)
            assert out.view("<f4").tolist() == [*range(9, 26)], name
        assert np.array_equal(
            tensors["layers/half"].read().astype("float32"), plain.astype(ml_dtypes.bfloat16).astype("f4")
        )
        assert tensors["layers/one"].read() == 2.5
        registry.named("keras").write(tmp_path / "b.weights.h5", Content(tensors))
    again, _ = read(tmp_path / "b.weights.h5")
    assert again["layers/half"].dtype == ml_dtypes.bfloat16
    assert np.array_equal(again["layers/pieces"], plain)


def test_h5_files_that_lead_elsewhere_are_refused(tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["secret"] = np.ones(3)
    hostile = {
        "external_link": lambda file: file.__setitem__("a", h5py.ExternalLink("other.h5", "/secret")),
        "soft_link": lambda file: file.__setitem__("a", h5py.SoftLink("/b")),
        "external_data": lambda file: file.create_dataset("a", (3,), "f8", external=[("/etc/hostname", 0, 24)]),
        "objects": lambda file: file.__setitem__("a", np.array([b"x"], dtype=h5py.string_dtype())),
        "cycle": lambda file: file.create_group("a").__setitem__("b", file["/"]),
    }
    layout = h5py.VirtualLayout((3,), "f8")
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "secret", (3,))
    hostile["virtual"] = lambda file: file.create_virtual_dataset("a", layout)
    for name, make in hostile.items():
        with h5py.File(tmp_path / f"{name}.weights.h5", "w") as file:
            make(file)
        with pytest.raises(TenutoError):
            read(tmp_path / f"{name}.weights.h5")
    model().save(tmp_path / "a.keras")
    with zipfile.ZipFile(tmp_path / "a.keras") as old, zipfile.ZipFile(tmp_path / "b.keras", "w", 8) as new:
        for member in old.namelist():
            new.writestr(member, old.read(member))
    with pytest.raises(CorruptionError, match="stored"):
        read(tmp_path / "b.keras")


class Net(tf.Module):
    def __init__(self):
        super().__init__()
        draw = tf.random.Generator.from_seed(4)
        self.layers = [tf.Variable(draw.normal((3, 4))), tf.Variable(draw.normal((4,)))]
        self.half = tf.Variable(tf.cast(draw.normal((5,)), tf.bfloat16))
        self.count = tf.Variable(7, dtype=tf.int64)


def test_a_bundle_is_read_without_tensorflow_and_one_that_is_written_is_read_by_it(tmp_path):
    net = Net()
    prefix = tf.train.Checkpoint(net=net).save(str(tmp_path / "run" / "ckpt"))
    for path in (tmp_path / "run", tmp_path / "run" / "ckpt-1.index"):
        arrays, reader = read(path)
        assert (reader.format, reader.step) == ("tf", 1)
        theirs = tf.train.load_checkpoint(prefix)
        for name, array in arrays.items():
            if name != "save_counter":
                assert np.array_equal(array, theirs.get_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE")), name
        assert {"net/layers/0", "net/layers/1", "net/half", "net/count"} < set(arrays)
    with registry.read(tmp_path / "run") as reader:
        registry.named("tf").write(tmp_path / "again", Content(reader.tensors()))
    back = tf.train.load_checkpoint(str(tmp_path / "again"))
    assert np.array_equal(back.get_tensor("net/layers/0"), net.layers[0].numpy())
    assert read(tmp_path / "again")[0].keys() == arrays.keys()


def test_damaged_and_cut_files_are_refused_or_give_what_was_saved(tmp_path):
    tf.train.Checkpoint(net=Net()).save(str(tmp_path / "a" / "ckpt"))
    index = tmp_path / "a" / "ckpt-1.index"
    sound, good = index.read_bytes(), read(index)[0]
    dice = random.Random(1)
    refused = 0
    for number in range(400):
        data = bytearray(sound)
        if number % 4:
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        else:
            del data[dice.randrange(len(data)) :]
        index.write_bytes(bytes(data))
        try:
            found = read(index)[0]
        except TenutoError:
            refused += 1
        else:  # a bit that no checksum covers, such as the padding of the footer
            assert found.keys() == good.keys()
            assert all(np.array_equal(found[name], good[name]) for name in good)
    assert refused > 350
    index.write_bytes(sound)
    data = tmp_path / "a" / "ckpt-1.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:40])  # inside a tensor; the object graph, which is not taken, lies last
    with pytest.raises(CorruptionError):
        read(index)


def test_it_is_imported_and_restored(tmp_path):
    made = model()
    made.save_weights(tmp_path / "a.weights.h5")
    with registry.read(tmp_path / "a.weights.h5") as reader:
        tenuto.save({name: tensor.read() for name, tensor in reader.tensors().items()}, tmp_path / "saved")
    assert tenuto.load(tmp_path / "saved").state
