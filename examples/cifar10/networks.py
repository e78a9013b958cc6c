"""The networks for CIFAR-10 of CNTK 2's examples, for images from which the mean was subtracted.

| name | parameters | architecture of |
|---|---|---|
| convnet | 1,195,594 | `ConvNet_CIFAR10_DataAug` |
| vgg9 | 2,675,978 | `create_vgg9_model` (tutorial CNTK 201B) |
| resnet20 | 272,474 | He et al. 2016 (arXiv:1512.03385), section 4.2, with convolutions as |
| resnet110 | 1,730,714 | shortcuts where the image shrinks (option B): `resnet_models` |
| bn-inception | 2,657,034 | Ioffe and Szegedy 2015 (arXiv:1502.03167), `bn_inception_cifar_model` |

Parameters are those that are trained; batch normalization has moving statistics besides.
"""

from typing import NamedTuple

import keras
from keras import layers

CLASSES = 10


class Style(NamedTuple):
    """What all layers of a network have in common.

    Attributes:
        l2: Of every parameter w: l2 w is added to its gradient.
        norm_momentum: Part of the moving statistics that a step leaves as it is.
        synchronized: Whether batch normalization sees the rows of all workers.
        dropout: Rate of the networks that have dropout.
        size: Height and width of the images; parameters are counted at CIFAR-10's.
    """

    l2: float = 0.0
    norm_momentum: float = 0.97
    synchronized: bool = True
    dropout: float = 0.5
    size: int = 32

    def image(self):
        return keras.Input((self.size, self.size, 3))

    def decay(self, *names):
        """Arguments for a layer whose parameters are regularized as CNTK's learners do it: all."""
        # The gradient of L2(c) is 2 c w.
        decay = keras.regularizers.L2(self.l2 / 2) if self.l2 else None
        return {f"{name}_regularizer": decay for name in names}

    def dense(self, units, activation=None):
        return layers.Dense(units, activation, **self.decay("kernel", "bias"))

    def conv(self, filters):
        """3 x 3 pixels, with a bias and ReLU."""
        decay = self.decay("kernel", "bias")
        return layers.Conv2D(filters, 3, padding="same", activation="relu", **decay)

    def conv_bn(self, x, filters, size, strides=1):
        """A convolution without bias, normalized."""
        x = layers.Conv2D(
            filters,
            size,
            strides,
            padding="same",
            use_bias=False,
            kernel_initializer="he_normal",
            **self.decay("kernel"),
        )(x)
        return layers.BatchNormalization(
            momentum=self.norm_momentum,
            epsilon=1e-5,
            synchronized=self.synchronized,
            **self.decay("gamma", "beta"),
        )(x)

    def conv_bn_relu(self, x, filters, size, strides=1):
        return layers.ReLU()(self.conv_bn(x, filters, size, strides))


def convnet(style):
    """Two pairs of convolutions, each with a pooling, and two hidden layers with dropout."""
    parts = [style.image(), layers.Rescaling(1 / 256)]
    for _ in range(2):
        parts += [style.conv(64), style.conv(64), layers.MaxPooling2D(3, 2, padding="same")]
    parts.append(layers.Flatten())
    for units in (256, 128):
        parts += [style.dense(units, "relu"), layers.Dropout(style.dropout)]
    return keras.Sequential([*parts, style.dense(CLASSES)], name="convnet")


def vgg9(style):
    """Three pairs of convolutions, each with a pooling, and two hidden layers of 1024 units."""
    parts = [style.image(), layers.Rescaling(1 / 256)]
    for filters in (64, 96, 128):
        parts += [style.conv(filters), style.conv(filters), layers.MaxPooling2D(3, 2)]
    parts += [layers.Flatten(), style.dense(1024, "relu"), style.dense(1024, "relu")]
    return keras.Sequential([*parts, style.dense(CLASSES)], name="vgg9")


def resnet(style, blocks):
    """6 `blocks` + 2 layers: three stages of `blocks` pairs of 16, 32 and 64 filters."""
    inputs = style.image()
    x = style.conv_bn_relu(inputs, 16, 3)
    for filters in (16, 32, 64):
        for block in range(blocks):
            shrinks = filters > 16 and block == 0
            y = style.conv_bn_relu(x, filters, 3, strides=2 if shrinks else 1)
            y = style.conv_bn(y, filters, 3)
            shortcut = style.conv_bn(x, filters, 1, strides=2) if shrinks else x
            x = layers.ReLU()(y + shortcut)
    outputs = style.dense(CLASSES)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs, name=f"resnet{6 * blocks + 2}")


def bn_inception(style):
    """Five convolutions, six blocks of parallel ones, and the mean over all pixels."""
    inputs = x = style.image()
    for filters, size in ((32, 3), (32, 3), (32, 3), (32, 1), (64, 3)):
        x = style.conv_bn_relu(x, filters, size)
    x = inception(style, x, 32, (32, 32), (32, 48), 16)
    x = shrinking_inception(style, x, (64, 80), (32, 48))
    x = inception(style, x, 96, (48, 64), (48, 64), 64)
    x = inception(style, x, 48, (64, 96), (80, 96), 64)
    x = shrinking_inception(style, x, (128, 192), (192, 256))
    x = inception(style, x, 176, (96, 160), (96, 112), 64, layers.MaxPooling2D)
    outputs = style.dense(CLASSES)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs, name="bn-inception")


def inception(style, x, single, triple, double, pooled, pooling=layers.AveragePooling2D):
    """1 x 1, 3 x 3, twice 3 x 3, and a pooling, side by side; all begin with or are 1 x 1.

    Args:
        style: Of its layers.
        x: Input.
        single: Filters of the 1 x 1 convolution.
        triple: Of the 1 x 1 convolution before a 3 x 3, and of that.
        double: Of the 1 x 1 convolution before two 3 x 3, and of each of those.
        pooled: Of the 1 x 1 convolution after the pooling.
        pooling: Layer that pools 3 x 3 pixels.
    """
    branches = [style.conv_bn_relu(x, single, 1), _triple(style, x, triple)]
    branches.append(_double(style, x, double))
    around = pooling(3, strides=1, padding="same")(x)
    branches.append(style.conv_bn_relu(around, pooled, 1))
    return layers.Concatenate()(branches)


def shrinking_inception(style, x, triple, double):
    """The same at half the height and width: no 1 x 1, and the pooling is passed on as it is."""
    branches = [_triple(style, x, triple, strides=2), _double(style, x, double, strides=2)]
    branches.append(layers.MaxPooling2D(3, 2, padding="same")(x))
    return layers.Concatenate()(branches)


def _triple(style, x, filters, strides=1):
    reduced, wide = filters
    return style.conv_bn_relu(style.conv_bn_relu(x, reduced, 1), wide, 3, strides)


def _double(style, x, filters, strides=1):
    reduced, wide = filters
    x = style.conv_bn_relu(style.conv_bn_relu(x, reduced, 1), wide, 3)
    return style.conv_bn_relu(x, wide, 3, strides)


NETWORKS = {
    "convnet": convnet,
    "vgg9": vgg9,
    "resnet20": lambda style: resnet(style, 3),
    "resnet110": lambda style: resnet(style, 18),
    "bn-inception": bn_inception,
}
