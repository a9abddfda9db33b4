"""Make the models in `files/` with the exporters that people use: `python -m tests.zoo.make [NAME ...]`.

The files are committed, so the tests need none of the exporters. `files/made.json` says which exporter and
which version made each. Weights are random: what matters is how an exporter declares inputs and outputs.

The packages, best in separate environments (TensorFlow and Paddle pin others' versions):
`torch torchvision transformers onnxscript onnx skl2onnx onnxmltools lightgbm onnxruntime` for most,
`tensorflow-cpu tf2onnx` for `keras_*`, `paddlepaddle paddle2onnx` for `paddle_*`.
"""

import itertools
import json
import sys
from importlib.metadata import version
from pathlib import Path

FILES = Path(__file__).parent / "files"
MAKERS = {}
"""The functions that make a model, by the name of the model; each returns who made it."""


def maker(function):
    """Keep a function that writes the model of its name."""
    MAKERS[function.__name__] = function
    return function


def packages(*names):
    """Name the packages with their versions."""
    return ", ".join(f"{name} {version(name).partition('+')[0]}" for name in names)


def torch_export(name, module, inputs, outputs, dynamic, *, dynamo=False):
    """Export a PyTorch module, and return who did that.

    :param inputs: example tensors by name.
    :param dynamic: names of dynamic axes by tensor and axis; with `dynamo`, of the inputs alone.
    """
    import torch

    module.eval()
    settings = {
        "input_names": list(inputs),
        "output_names": outputs,
        "opset_version": 18 if dynamo else 17,
        "dynamo": dynamo,
    }
    if dynamo:
        dims = {dim: torch.export.Dim(dim) for axes in dynamic.values() for dim in axes.values()}
        shapes = [{axis: dims[dim] for axis, dim in dynamic.get(one, {}).items()} for one in inputs]
        settings |= {"dynamic_shapes": shapes, "external_data": False}
    else:
        settings["dynamic_axes"] = dynamic
    path = FILES / f"{name}.onnx"
    torch.onnx.export(module, tuple(inputs.values()), str(path), **settings)
    forget_traces(path)
    return f"{packages('torch')}, {'torch.export' if dynamo else 'TorchScript'}"


def forget_traces(path):
    """Drop the stack traces that PyTorch keeps with each node: they are most of a small file."""
    import onnx

    model = onnx.load(path)
    for part in (*model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output):
        del part.metadata_props[:]
    onnx.save(model, path)


@maker
def lstm_time_first():
    """An LSTM as PyTorch lays it out by default: rows are the second axis of every tensor."""
    import torch

    return torch_export(
        "lstm_time_first",
        torch.nn.LSTM(8, 16),
        {"input": torch.randn(5, 2, 8)},
        ["output", "hidden", "cell"],
        {
            "input": {0: "time", 1: "batch"},
            "output": {0: "time", 1: "batch"},
            "hidden": {1: "batch"},
            "cell": {1: "batch"},
        },
    )


@maker
def lstm_batch_first():
    """An LSTM with `batch_first=True`: its last states still have the rows on their second axis."""
    import torch

    return torch_export(
        "lstm_batch_first",
        torch.nn.LSTM(8, 16, batch_first=True),
        {"input": torch.randn(2, 5, 8)},
        ["output", "hidden", "cell"],
        {
            "input": {0: "batch", 1: "time"},
            "output": {0: "batch", 1: "time"},
            "hidden": {1: "batch"},
            "cell": {1: "batch"},
        },
    )


@maker
def gru_stream():
    """A step of a stream: it takes the state that the last call returned, rows on its second axis."""
    import torch

    return torch_export(
        "gru_stream",
        torch.nn.GRU(8, 16, num_layers=2, batch_first=True),
        {"input": torch.randn(2, 4, 8), "state": torch.randn(2, 2, 16)},
        ["output", "state_out"],
        {
            "input": {0: "batch", 1: "time"},
            "state": {1: "batch"},
            "output": {0: "batch", 1: "time"},
            "state_out": {1: "batch"},
        },
    )


def small_bert():
    """Return a BERT of random weights."""
    import torch
    from transformers import BertConfig, BertModel

    class Encoder(torch.nn.Module):
        """Takes what a tokenizer returns, in its order."""

        def __init__(self):
            super().__init__()
            self.bert = BertModel(config)

        def forward(self, input_ids, attention_mask, token_type_ids):
            return self.bert(input_ids, attention_mask, token_type_ids)

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=48,
        return_dict=False,
        attn_implementation="eager",
    )
    return Encoder()


def bert_inputs():
    """Return example inputs of the BERT, and the names of their axes."""
    import torch

    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = {name: torch.ones(2, 7, dtype=torch.int64) for name in names}
    return inputs, {name: {0: "batch_size", 1: "sequence_length"} for name in names}


@maker
def bert():
    """The encoder of transformers, with the names of inputs and axes that Optimum gives them."""
    inputs, axes = bert_inputs()
    axes |= {"last_hidden_state": {0: "batch_size", 1: "sequence_length"}, "pooler_output": {0: "batch_size"}}
    made = torch_export("bert", small_bert(), inputs, ["last_hidden_state", "pooler_output"], axes)
    return f"{packages('transformers')}, {made}"


@maker
def bert_dynamo():
    """The same by PyTorch's newer exporter."""
    inputs, axes = bert_inputs()
    outputs = ["last_hidden_state", "pooler_output"]
    made = torch_export("bert_dynamo", small_bert(), inputs, outputs, axes, dynamo=True)
    return f"{packages('transformers')}, {made}"


@maker
def bert_quantized():
    """The encoder in 8 bits: each activation has one scale for the whole batch."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(FILES / "bert.onnx", FILES / "bert_quantized.onnx", weight_type=QuantType.QInt8)
    return f"{packages('onnxruntime')}, quantize_dynamic"


def decoder_module():
    """Return a decoder that attends to audio and to the keys and values of earlier calls."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    class Decoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = torch.nn.Embedding(96, 16)
            self.places = torch.nn.Embedding(64, 16)
            self.parts = torch.nn.Linear(16, 48)
            self.query = torch.nn.Linear(16, 16)
            self.audio = torch.nn.Linear(16, 32)
            self.logits = torch.nn.Linear(16, 96)

        def heads(self, states):
            return states.unflatten(-1, (2, 8)).transpose(1, 2)

        def forward(self, input_ids, encoder_hidden_states, past_key, past_value):
            past, new = past_key.shape[2], input_ids.shape[1]
            states = self.tokens(input_ids) + self.places(torch.arange(new) + past)
            query, key, value = (self.heads(part) for part in self.parts(states).chunk(3, -1))
            key, value = torch.cat((past_key, key), 2), torch.cat((past_value, value), 2)
            mask = torch.arange(past + new)[None] <= (torch.arange(new) + past)[:, None]
            found = scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2)
            states = states + found
            over = [self.heads(part) for part in self.audio(encoder_hidden_states).chunk(2, -1)]
            found = scaled_dot_product_attention(self.heads(self.query(states)), *over)
            return self.logits(states + found.transpose(1, 2).flatten(2)), key, value

    torch.manual_seed(0)
    return Decoder()


@maker
def decoder_cache():
    """A decoder as Whisper's, with the names of Optimum: the cache grows, and is empty at first."""
    import torch

    cache = torch.randn(2, 2, 3, 8)
    past, present = "past_key_values.0.decoder", "present.0.decoder"
    grown = "past_decoder_sequence_length + 1"
    return torch_export(
        "decoder_cache",
        decoder_module(),
        {
            "input_ids": torch.ones(2, 2, dtype=torch.int64),
            "encoder_hidden_states": torch.randn(2, 5, 16),
            f"{past}.key": cache,
            f"{past}.value": cache,
        },
        ["logits", f"{present}.key", f"{present}.value"],
        {
            "input_ids": {0: "batch_size", 1: "decoder_sequence_length"},
            "encoder_hidden_states": {0: "batch_size", 1: "encoder_sequence_length"},
            f"{past}.key": {0: "batch_size", 2: "past_decoder_sequence_length"},
            f"{past}.value": {0: "batch_size", 2: "past_decoder_sequence_length"},
            "logits": {0: "batch_size", 1: "decoder_sequence_length"},
            f"{present}.key": {0: "batch_size", 2: grown},
            f"{present}.value": {0: "batch_size", 2: grown},
        },
    )


def detector(width=8):
    """Return a detector: boxes in pixels and scores of 4 classes, for each 8 x 8 pixels."""
    import torch

    class Detector(torch.nn.Module):
        def __init__(self):
            super().__init__()
            sizes = (3, width, width, width)
            self.body = torch.nn.Sequential(
                *[
                    part
                    for one, other in itertools.pairwise(sizes)
                    for part in (torch.nn.Conv2d(one, other, 3, 2, 1), torch.nn.SiLU())
                ],
                torch.nn.Conv2d(width, 8, 1),
            )

        def forward(self, images):
            found = self.body(images)
            places = torch.stack(
                (
                    torch.arange(found.shape[3]).expand(found.shape[2:]),
                    torch.arange(found.shape[2])[:, None].expand(found.shape[2:]),
                )
            )
            corners = (places + found[:, :2]) * 8
            return torch.cat(
                (corners, (8 * found[:, 2:4]).exp() * 12, (30 * found[:, 4:]).sigmoid()), 1
            ).flatten(2)

    torch.manual_seed(0)
    return Detector()


@maker
def yolo_batch_1():
    """A detector as YOLO is exported by default: one picture of one size."""
    import torch

    return torch_export("yolo_batch_1", detector(), {"images": torch.randn(1, 3, 64, 64)}, ["output0"], {})


@maker
def yolo_dynamic():
    """A detector of pictures of any size."""
    import torch

    axes = {"images": {0: "batch", 2: "height", 3: "width"}, "output0": {0: "batch", 2: "anchors"}}
    inputs = {"images": torch.randn(1, 3, 64, 64)}
    return torch_export("yolo_dynamic", detector(), inputs, ["output0"], axes)


@maker
def yolo_nms():
    """A detector that drops overlapping boxes itself: its rows are boxes, of all pictures together."""
    import torch
    from torchvision.ops import batched_nms

    class EndToEnd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.detector = detector()

        def forward(self, images):
            found = self.detector(images).transpose(1, 2)
            picture = torch.arange(found.shape[0])[:, None].expand(found.shape[:2]).reshape(-1)
            found = found.reshape(-1, found.shape[2])
            boxes = torch.cat((found[:, :2], found[:, :2] + found[:, 2:4]), 1)
            score, kind = found[:, 4:].max(1)
            kept = batched_nms(boxes, score, picture, 0.3)
            columns = (picture[:, None].float(), boxes, score[:, None], kind[:, None].float())
            return torch.cat(columns, 1)[kept]

    axes = {"images": {0: "batch"}, "detections": {0: "num_detections"}}
    made = torch_export("yolo_nms", EndToEnd(), {"images": torch.randn(2, 3, 64, 64)}, ["detections"], axes)
    return f"{made}, {packages('torchvision')}"


@maker
def graph():
    """A network over a graph: nodes with features, and a list of edges."""
    import torch

    class Graph(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)

        def forward(self, x, edge_index):
            for layer in (self.first, self.second):
                sent = layer(x)[edge_index[0]]
                x = torch.zeros(x.shape[0], sent.shape[1]).index_add(0, edge_index[1], sent).tanh()
            return x

    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, 16), "edge_index": torch.zeros(2, 6, dtype=torch.int64)}
    axes = {"x": {0: "nodes"}, "edge_index": {1: "edges"}, "logits": {0: "nodes"}}
    return torch_export("graph", Graph(), inputs, ["logits"], axes)


@maker
def scalar():
    """Sampling with a temperature, which is a scalar."""
    import torch

    class Sampling(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 32)

        def forward(self, x, temperature):
            return (self.layer(x) / temperature).softmax(-1)

    torch.manual_seed(0)
    axes = {"x": {0: "batch"}, "probabilities": {0: "batch"}}
    inputs = {"x": torch.randn(2, 8), "temperature": torch.tensor(0.7)}
    return torch_export("scalar", Sampling(), inputs, ["probabilities"], axes)


@maker
def two_towers():
    """Texts against pictures, as CLIP: the rows of the answer are pictures, its columns texts."""
    import torch

    class Towers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.text, self.picture = torch.nn.Embedding(64, 16), torch.nn.Conv2d(3, 16, 8, 8)

        def forward(self, input_ids, pixel_values):
            text = torch.nn.functional.normalize(self.text(input_ids).mean(1), dim=-1)
            picture = torch.nn.functional.normalize(self.picture(pixel_values).mean((2, 3)), dim=-1)
            return picture @ text.T, text, picture

    torch.manual_seed(0)
    inputs = {"input_ids": torch.ones(3, 5, dtype=torch.int64), "pixel_values": torch.randn(2, 3, 32, 32)}
    axes = {
        "input_ids": {0: "text_batch_size", 1: "sequence_length"},
        "pixel_values": {0: "image_batch_size"},
        "logits_per_image": {0: "image_batch_size", 1: "text_batch_size"},
        "text_embeds": {0: "text_batch_size"},
        "image_embeds": {0: "image_batch_size"},
    }
    return torch_export(
        "two_towers", Towers(), inputs, ["logits_per_image", "text_embeds", "image_embeds"], axes
    )


@maker
def voice():
    """Speech from phonemes, as Piper's: three scales for a call, and sound as long as the longest text's."""
    import torch

    class Voice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.sounds, self.wave = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 4)

        def forward(self, input, input_lengths, scales):  # noqa: A002  (it is Piper's name)
            mask = torch.arange(input.shape[1])[None] < input_lengths[:, None]
            states = self.sounds(input) + torch.randn_like(self.sounds(input)) * scales[0]
            taken = (input % 3 + 1) * mask
            ends = (taken * scales[1]).ceil().cumsum(1)
            places = torch.arange(0, ends[:, -1].max())[None, :, None]
            index = (places >= ends[:, None]).sum(-1).clamp(max=input.shape[1] - 1)
            spread = states.gather(1, index[..., None].expand(-1, -1, 16))
            sound = self.wave(spread).flatten(1) * (places[..., 0] < ends[:, -1:]).repeat_interleave(4, 1)
            return sound[:, None, None]

    torch.manual_seed(0)
    inputs = {
        "input": torch.ones(2, 6, dtype=torch.int64),
        "input_lengths": torch.tensor([6, 4]),
        "scales": torch.tensor([0.0, 1.0, 0.0]),
    }
    axes = {
        "input": {0: "batch_size", 1: "phonemes"},
        "input_lengths": {0: "batch_size"},
        "output": {0: "batch_size", 3: "time"},
    }
    return torch_export("voice", Voice(), inputs, ["output"], axes)


@maker
def speech():
    """Speech to letters, as NeMo's: spectrograms of any length, and how long each is."""
    import torch

    class Speech(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Conv1d(20, 16, 3, 2, 1), torch.nn.Conv1d(16, 30, 3, 2, 1)

        def forward(self, audio_signal, length):
            mask = torch.arange(audio_signal.shape[2])[None] < length[:, None]
            states = self.first(audio_signal * mask[:, None]).relu()
            return self.second(states).transpose(1, 2).log_softmax(-1), (length + 3) // 4

    torch.manual_seed(0)
    inputs = {"audio_signal": torch.randn(2, 20, 24), "length": torch.tensor([24, 17])}
    axes = {"audio_signal": {0: "B", 2: "T"}, "length": {0: "B"}}
    return torch_export("speech", Speech(), inputs, ["logprobs", "encoded_lengths"], axes, dynamo=True)


@maker
def half():
    """A perceptron in float16."""
    import torch

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).half()
    inputs = {"input": torch.randn(2, 16, dtype=torch.float16)}
    return torch_export("half", module, inputs, ["output"], {"input": {0: "batch"}, "output": {0: "batch"}})


@maker
def passed_through():
    """A graph that returns one of its inputs as it is, so that a name is both an input and an output.

    ONNX allows it, and exporters that clean up `Identity` leave it. It is made by hand.
    """
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weights = np.random.default_rng(0).standard_normal((4, 3), np.float32)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    key = helper.make_tensor_value_info("key", TensorProto.INT64, ["batch"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])
    made = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "passed_through",
        [x, key],
        [y, key],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, FILES / "passed_through.onnx")
    return f"{packages('onnx')}, by hand"


def people():
    """Return a table of numbers and words, and what is to be told from it."""
    import numpy as np

    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((200, 3)).astype(np.float32)
    towns = rng.choice(["Bern", "Oslo", "Rome"], (200, 1)).astype(object)
    kinds = np.where(numbers[:, 0] + (towns[:, 0] == "Rome") > 0.3, "high", "low")
    return numbers, towns, kinds


@maker
def sklearn_table():
    """A pipeline of scikit-learn with a column of strings; labels are strings, probabilities are maps."""
    import numpy as np
    import onnx
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    numbers, towns, kinds = people()
    columns = ColumnTransformer([("n", StandardScaler(), [0, 1, 2]), ("t", OneHotEncoder(), [3])])
    pipeline = make_pipeline(columns, LogisticRegression())
    pipeline.fit(np.hstack((numbers.astype(object), towns)), kinds)
    types = [("numbers", FloatTensorType([None, 3])), ("town", StringTensorType([None, 1]))]
    onnx.save(to_onnx(pipeline, initial_types=types, target_opset=17), FILES / "sklearn_table.onnx")
    return packages("skl2onnx", "scikit-learn")


@maker
def sklearn_forest():
    """A forest with `zipmap=False`: probabilities are a tensor."""
    import onnx
    from skl2onnx import to_onnx
    from sklearn.ensemble import RandomForestClassifier

    numbers, _, kinds = people()
    forest = RandomForestClassifier(8, max_depth=5, random_state=0).fit(
        numbers, (kinds == "high").astype(int)
    )
    model = to_onnx(forest, numbers[:1], options={"zipmap": False}, target_opset=17)
    onnx.save(model, FILES / "sklearn_forest.onnx")
    return f"{packages('skl2onnx', 'scikit-learn')}, zipmap=False"


@maker
def sklearn_texts():
    """Words that are counted and weighed, and a class for each text."""
    import onnx
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import StringTensorType
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.pipeline import make_pipeline

    texts = ["the ship sank", "a fine ship", "the price fell", "prices rise again", "a ship at sea"]
    pipeline = make_pipeline(TfidfVectorizer(token_pattern="[a-z]+"), MultinomialNB())
    pipeline.fit(texts, [0, 0, 1, 1, 0])
    types = [("text", StringTensorType([None, 1]))]
    # By default it asks for the locale en_US, which containers have not: ONNX Runtime then refuses the model.
    options = {TfidfVectorizer: {"locale": "C"}}
    model = to_onnx(pipeline, initial_types=types, options=options, target_opset=17)
    onnx.save(model, FILES / "sklearn_texts.onnx")
    return packages("skl2onnx", "scikit-learn")


@maker
def lightgbm_classes():
    """Trees of LightGBM, which onnxmltools converts with maps of probabilities."""
    import lightgbm
    import onnx
    from onnxmltools import convert_lightgbm
    from onnxmltools.convert.common.data_types import FloatTensorType

    numbers, _, kinds = people()
    trees = lightgbm.LGBMClassifier(n_estimators=10, num_leaves=7, verbose=-1)
    trees.fit(numbers, (kinds == "high").astype(int))
    types = [("input", FloatTensorType([None, 3]))]
    onnx.save(convert_lightgbm(trees, initial_types=types, target_opset=15), FILES / "lightgbm_classes.onnx")
    return packages("onnxmltools", "lightgbm")


def keras_model(name, inputs, outputs):
    """Convert a Keras model with tf2onnx, and return who did that."""
    import keras
    import tensorflow as tf
    import tf2onnx

    model = keras.Model(inputs, outputs)
    signature = [
        tf.TensorSpec(one.shape, one.dtype, name=one.name)
        for one in (inputs if isinstance(inputs, list) else [inputs])
    ]
    function = tf.function(lambda *tensors: model(tensors if len(tensors) > 1 else tensors[0]))
    tf2onnx.convert.from_function(function, signature, opset=17, output_path=str(FILES / f"{name}.onnx"))
    return packages("tf2onnx", "tensorflow-cpu")


@maker
def keras_texts():
    """Texts of any length through an LSTM: dimensions are called `unk__7`, each another number."""
    import keras

    keras.utils.set_random_seed(0)
    ids = keras.Input((None,), dtype="int32", name="ids")
    states = keras.layers.Embedding(64, 12)(ids)
    states = keras.layers.LSTM(12)(states)
    return keras_model("keras_texts", ids, keras.layers.Dense(5, activation="softmax")(states))


@maker
def keras_picture():
    """A small convolutional network over pictures of one size, channels last."""
    import keras

    keras.utils.set_random_seed(0)
    picture = keras.Input((24, 24, 3), name="picture")
    states = keras.layers.Conv2D(8, 3, strides=2, activation="relu")(picture)
    states = keras.layers.GlobalAveragePooling2D()(states)
    return keras_model("keras_picture", picture, keras.layers.Dense(5)(states))


@maker
def paddle_lines():
    """Lines of text as PaddleOCR reads them: a convolution, then a step for each few columns of pixels."""
    import paddle

    class Lines(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.first = paddle.nn.Conv2D(3, 8, 3, 2, 1)
            self.second = paddle.nn.Conv2D(8, 16, 3, 2, 1)
            self.letters = paddle.nn.Linear(16, 30)

        def forward(self, x):
            states = paddle.nn.functional.relu(self.second(paddle.nn.functional.relu(self.first(x))))
            return paddle.nn.functional.softmax(self.letters(states.mean(2).transpose([0, 2, 1])), -1)

    paddle.seed(0)
    spec = paddle.static.InputSpec([-1, 3, 32, -1], "float32", "x")
    model = Lines()
    model.eval()
    paddle.onnx.export(model, str(FILES / "paddle_lines"), input_spec=[spec], opset_version=17)
    return packages("paddle2onnx", "paddlepaddle")


def main():
    """Make the models that are named, or all."""
    record = FILES / "made.json"
    made = json.loads(record.read_text()) if record.exists() else {}
    for name in sys.argv[1:] or MAKERS:
        made[name] = MAKERS[name]()
        print(f"{name}: {(FILES / f'{name}.onnx').stat().st_size:,} bytes, {made[name]}")
        record.write_text(json.dumps(dict(sorted(made.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
