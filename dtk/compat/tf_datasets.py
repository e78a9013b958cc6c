"""What a rank reads: a dataset that Keras takes to be distributed already.

tensorflow.python.distribute.distribute_utils       regroup
tensorflow.python.distribute.input_lib              DistributedDataset (its name)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import tensorflow as tf
from tensorflow.python.distribute import (
    distribute_utils,
    input_lib,
)

from dtk.nests import Function, Nest


def regroup(parts: tuple[Nest, ...]) -> Nest:
    """Turn one structure per replica into one structure of per-replica values.

    Args:
        parts: One structure of tensors per replica of this process.
    """
    return distribute_utils.regroup(parts, always_wrap=True)


class PerRankDataset(input_lib.DistributedDataset):
    """Dataset of a rank's own batches, which `fit` must not cut again.

    Keras recognises it by the name of its base class, of which nothing else is used.

    Args:
        local: Dataset of this rank's rows (a tuple of parts if a process holds several replicas),
            or a function that makes it, called where it is read: `fit` cuts `whole` in its own way.
        whole: The dataset of global batches it was cut from; None when every rank has a pipeline of
            its own and only the sum over ranks tells how many rows a global batch has.
        regrouped: Whether elements of `local` are tuples of parts, which a custom loop gets as
            per-replica values.
        on_read: Called with the digest of each batch that is read; `local` has pairs then, of rows
            and digests.
    """

    def __init__(
        self,
        local: tf.data.Dataset | Callable[[], tf.data.Dataset],
        whole: tf.data.Dataset | None,
        regrouped: bool = False,
        on_read: Callable[[tf.Tensor], None] | None = None,
    ):
        self._local = local
        self.whole = whole
        self._regrouped = regrouped
        self._on_read = on_read

    @property
    def local(self) -> tf.data.Dataset:
        """Dataset of this rank's rows."""
        if not isinstance(self._local, tf.data.Dataset):
            self._local = self._local()
        return self._local

    @property
    def element_spec(self) -> tf.TypeSpec:
        """Specification of a local element."""
        return self.local.element_spec

    @property
    def cardinality(self) -> tf.Tensor:
        """Number of batches in an epoch; a property, as in `tf.distribute.DistributedDataset`."""
        return self.local.cardinality()

    def map(self, function: Function[Nest]) -> PerRankDataset:
        """Apply a function to every batch, as Keras does to turn class weights into row weights.

        Args:
            function: Applied to local and to global batches.

        Returns:
            A dataset of the results.
        """
        whole = None if self.whole is None else self.whole.map(function)
        return PerRankDataset(lambda: self.local.map(function), whole, self._regrouped)

    def prefetch(self, count: int) -> PerRankDataset:
        """Keep batches ready.

        Args:
            count: How many.
        """
        return PerRankDataset(lambda: self.local.prefetch(count), self.whole, self._regrouped)

    def __len__(self) -> int:
        return len(self.local)

    def __iter__(self) -> Iterator[Nest]:
        if self._on_read is not None:
            return self._observed(self._on_read)
        return map(regroup, self.local) if self._regrouped else iter(self.local)

    def _observed(self, on_read: Callable[[tf.Tensor], None]) -> Iterator[Nest]:
        for rows, digest in self.local:
            on_read(digest)
            yield rows

    def reduce(self, initial_state: Nest, reduce_func: Callable[[Nest, Nest], Nest]) -> Nest:
        """Reduce all local elements, as `for` does inside a `tf.function`.

        Args:
            initial_state: As for `tf.data.Dataset.reduce`.
            reduce_func: As for `tf.data.Dataset.reduce`; gets per-replica values where they are
                regrouped.
        """
        if not self._regrouped:
            return self.local.reduce(initial_state, reduce_func)
        return self.local.reduce(
            initial_state, lambda state, parts: reduce_func(state, regroup(parts))
        )

    @property
    def _type_spec(self) -> PerRankDatasetSpec:
        return PerRankDatasetSpec(tf.data.DatasetSpec(self.local.element_spec), self._regrouped)


class PerRankDatasetSpec(tf.TypeSpec):
    """Type of a `PerRankDataset`, by which it can be an argument of a `tf.function`.

    Args:
        local: Specification of the dataset of this rank's rows.
        regrouped: As in `PerRankDataset`.
    """

    def __init__(self, local: tf.data.DatasetSpec, regrouped: bool):
        self._local = local
        self._regrouped = regrouped

    @property
    def value_type(self) -> type:
        """Type of what it specifies."""
        return PerRankDataset

    def _serialize(self) -> tuple[tf.data.DatasetSpec, bool]:
        return self._local, self._regrouped

    @property
    def _component_specs(self) -> tf.data.DatasetSpec:
        return self._local

    def _to_components(self, value: PerRankDataset) -> tf.data.Dataset:
        return value.local

    def _from_components(self, components: tf.data.Dataset) -> PerRankDataset:
        return PerRankDataset(components, None, self._regrouped)
