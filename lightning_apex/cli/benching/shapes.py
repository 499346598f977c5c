"""The parameter shapes of well-known models, written out so that no model library is needed."""

from __future__ import annotations

Shapes = list[tuple[int, ...]]


def resnet50() -> Shapes:
    """161 tensors, 25,557,032 elements."""
    shapes: Shapes = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for conv in ((width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [conv, conv[:1], conv[:1]]
            if block == 0:
                shapes += [(4 * width, inputs, 1, 1), (4 * width,), (4 * width,)]
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def gpt2_small() -> Shapes:
    """148 tensors, 124,439,808 elements."""
    d = 768
    block: Shapes = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [(50257, d), (1024, d), *(block * 12), (d,), (d,)]


def mixed(tensors: int) -> Shapes:
    """Tensors of 1 to 1000 elements, as many small as large."""
    sizes = (1, 3, 10, 32, 100, 317, 1000)
    return [(sizes[i % len(sizes)],) for i in range(tensors)]


def small(tensors: int, elements: int) -> Shapes:
    """Many tensors in which a step's cost is not bytes."""
    return [(elements,)] * tensors
