"""How many bytes of a model's weights stand where: what can be cut over ranks, what is repeated, what stays on the host."""

from __future__ import annotations

from attrs import frozen


@frozen
class TensorBytes:
    """The sizes of a model's tensors as they are on disk, in bytes.

    @ivar layers: of each layer by its number, with its experts.
    @ivar experts: of each layer's experts alone; 0 for a dense layer.
    @ivar embedding: the table of input embeddings.
    @ivar output: the head that makes logits; 0 where it is tied to the embedding.
    @ivar other: whatever has no layer's number: last norm, a vision tower, projectors.
    @ivar largest: the largest single tensor.
    """

    layers: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    embedding: int = 0
    output: int = 0
    other: int = 0
    largest: int = 0
