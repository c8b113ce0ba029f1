"""Nets for the tests, as text; batches are those of one process."""

from __future__ import annotations

from pathlib import Path

_LENET = """
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
        param { lr_mult: 1 } param { lr_mult: 2 }
        convolution_param { num_output: 8 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "pool1" type: "Pooling" bottom: "conv1" top: "pool1"
        pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
layer { name: "ip1" type: "InnerProduct" bottom: "pool1" top: "ip1"
        inner_product_param { num_output: 32 weight_filler { type: "xavier" } } }
layer { name: "relu1" type: "ReLU" bottom: "ip1" top: "ip1" }
layer { name: "ip2" type: "InnerProduct" bottom: "ip1" top: "ip2"
        inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip2" bottom: "label" top: "loss" }
"""


def input_layer(kind: str, parameters: str, transform: str = "") -> str:
    """A layer that gives "data" and "label"; `parameters` with the name of their field."""
    return (
        f'layer {{ name: "input" type: "{kind}" top: "data" top: "label" {parameters} '
        f"transform_param {{ {transform} }} }}"
        if transform
        else f'layer {{ name: "input" type: "{kind}" top: "data" top: "label" {parameters} }}'
    )


def digits_input(digits: Path, batch: int, kind: str = "HDF5Data") -> str:
    """The digits of the fixture of that name, by HDF5Data or (LMDB) by Data."""
    if kind == "HDF5Data":
        parameters = f'hdf5_data_param {{ source: "{digits}/digits.txt" batch_size: {batch} }}'
        return input_layer(kind, parameters)
    source = f'source: "{digits}/digits.lmdb" backend: LMDB'
    return input_layer(kind, f"data_param {{ {source} batch_size: {batch} }}", "scale: 0.0625")


def lenet(digits: Path, batch: int, kind: str = "HDF5Data") -> str:
    """A small LeNet for digits."""
    return f'name: "LeNet"\n{digits_input(digits, batch, kind)}\n{_LENET}'


def lenet_on(layer: str) -> str:
    """The same with another input layer."""
    return f'name: "LeNet"\n{layer}\n{_LENET}'


def odd_net(layer: str) -> str:
    """Two layers with the same weights, and one that learns nothing, on an input of 64 numbers."""
    shared = 'param { name: "w" } param { name: "b" lr_mult: 2 }'
    fill = 'weight_filler { type: "xavier" }'
    return f"""
{layer}
layer {{ name: "flat" type: "Flatten" bottom: "data" top: "flat" }}
layer {{ name: "frozen" type: "InnerProduct" bottom: "flat" top: "f" param {{ lr_mult: 0 }}
        param {{ lr_mult: 0 }} inner_product_param {{ num_output: 24 {fill} }} }}
layer {{ name: "first" type: "InnerProduct" bottom: "f" top: "a" {shared}
        inner_product_param {{ num_output: 24 {fill} }} }}
layer {{ name: "tanh" type: "TanH" bottom: "a" top: "a" }}
layer {{ name: "second" type: "InnerProduct" bottom: "a" top: "c" {shared}
        inner_product_param {{ num_output: 24 {fill} }} }}
layer {{ name: "last" type: "InnerProduct" bottom: "c" top: "d"
        inner_product_param {{ num_output: 10 {fill} }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "d" bottom: "label" top: "loss" }}
"""


def accuracy_layer(scores: str) -> str:
    """What a test net says of the blob `scores`, besides the loss."""
    return (
        f'layer {{ name: "accuracy" type: "Accuracy" bottom: "{scores}" bottom: "label" '
        'top: "accuracy" include { phase: TEST } }'
    )


def linear_net(source: Path) -> str:
    """Outputs whose sum is the loss, so that gradients do not depend on the weights.

    Two layers have the same weights, and the last one learns nothing.
    """

    def layer(name: str, outputs: int, parameter: str, bias: bool = False, value: float = 0) -> str:
        fill = f'weight_filler {{ type: "constant" value: {value} }}'
        return (
            f'layer {{ name: "{name}" type: "InnerProduct" bottom: "data" top: "{name}" '
            f"loss_weight: 1 {parameter} inner_product_param {{ num_output: {outputs} "
            f"bias_term: {str(bias).lower()} {fill} }} }}"
        )

    shared = 'param { name: "w" }'
    return f"""
layer {{ name: "input" type: "HDF5Data" top: "data"
        hdf5_data_param {{ source: "{source}" batch_size: 1 }} }}
{layer("wide", 3, "", bias=True)}
{layer("narrow", 1, "")}
{layer("shared", 2, shared)}
{layer("again", 2, shared)}
{layer("frozen", 2, "param { lr_mult: 0 }", value=0.5)}
"""
