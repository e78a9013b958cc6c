"""Small, seeded stand-ins for what published scripts download, in the shapes that they expect.

Images are a pattern of their class under noise, texts have words of their class, so that there is
something to learn and every class is seen. Files of a script's own are written by the code that
published_scripts.toml has for it, into the folder where the script runs.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any

import numpy as np

WORDS = [a + b + c for a in "bdfgklmn" for b in "aeiou" for c in ("n", "r", "st", "ll", "x")]


def images(rows: int, shape: tuple[int, ...], classes: int, seed: int = 0) -> tuple[Any, Any]:
    """Make images of 0 to 255, and the number of each one's class; as many of each class."""
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.arange(rows) % classes)
    patterns = np.random.default_rng(99).uniform(0, 160, size=(classes, *shape))
    noise = generator.uniform(0, 95, size=(rows, *shape))
    return (patterns[labels] + noise).astype("uint8"), labels


def sentences(
    rows: int, classes: int = 2, length: int = 20, seed: int = 0
) -> tuple[list[str], Any]:
    """Make texts of up to so many words, and the number of each one's class."""
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.arange(rows) % classes)
    found = []
    for label in labels:
        own = WORDS[label :: classes + 1]
        size = generator.integers(length // 2, length + 1)
        pools = [own if generator.random() < 0.4 else WORDS for _ in range(size)]
        found.append(" ".join(pool[generator.integers(len(pool))] for pool in pools))
    return found, labels


def numbers(rows: int, columns: int, seed: int = 0) -> Any:
    """Make columns of correlated numbers, such as a measurement over time."""
    generator = np.random.default_rng(seed)
    time = np.arange(rows)[:, None]
    waves = np.sin(time / generator.uniform(3, 30, columns) + generator.uniform(0, 6, columns))
    return waves + 0.3 * generator.normal(size=(rows, columns))


def census(path: str, rows: int, seed: int = 0, end: str = "") -> None:
    """Write a file like the census's `adult.data`: 14 columns of people, and their income."""
    generator = np.random.default_rng(seed)
    kinds = {
        1: "work",
        3: "school",
        5: "marriage",
        6: "job",
        7: "family",
        8: "race",
        9: "gender",
        13: "country",
    }
    lines = ["|header"] if end else []
    for row in range(rows):
        age, hours = generator.integers(17, 90), generator.integers(1, 99)
        fields = [
            age,
            "",
            generator.integers(10000, 300000),
            "",
            generator.integers(1, 16),
            "",
            "",
            "",
            "",
            "",
            generator.integers(0, 9999) * (row % 3 == 0),
            0,
            hours,
            "",
        ]
        for column, kind in kinds.items():
            fields[column] = f" {kind}-{(row + column) % (4 if column < 13 else 6)}"
        rich = age + hours + generator.normal(0, 20) > 100
        lines.append(",".join(map(str, fields)) + (", >50K" if rich else ", <=50K") + end)
    with open(path, "w") as file:
        file.write("\n".join(lines) + "\n")


def heart(path: str, rows: int) -> None:
    """Write a file like `heart.csv`: 13 columns of patients, and whether they are ill."""
    generator = np.random.default_rng(3)
    with open(path, "w") as file:
        file.write(
            "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,target\n"
        )
        for row in range(rows):
            age, chol = generator.integers(29, 77), generator.integers(126, 400)
            first = [age, row % 2, row % 5, generator.integers(94, 200), chol, row % 3 == 0]
            last = [
                row % 3,
                generator.integers(71, 202),
                row % 4 == 0,
                f"{generator.uniform(0, 6):.1f}",
                row % 3 + 1,
                row % 4,
                ("fixed", "normal", "reversible")[row % 3],
            ]
            ill = age * 4 + chol + generator.normal(0, 60) > 500
            file.write(
                ",".join(
                    str(int(v) if isinstance(v, bool | np.bool_) else v)
                    for v in [*first, *last, ill]
                )
                + "\n"
            )


def movies(folder: str, rows: int, users: int = 30, count: int = 60) -> None:
    """Write `ratings.csv` and `movies.csv` like MovieLens's, and a zip of the folder beside it."""
    import zipfile

    generator = np.random.default_rng(4)
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/ratings.csv", "w") as file:
        file.write("userId,movieId,rating,timestamp\n")
        for row in range(rows):
            user, movie = row % users + 1, generator.integers(1, count + 1)
            rating = np.clip(round(2 * generator.normal(2 + (user + movie) % 4, 0.5)) / 2, 0.5, 5)
            file.write(f"{user},{movie},{rating},{row * 1000}\n")
    with open(f"{folder}/movies.csv", "w") as file:
        file.write("movieId,title,genres\n")
        for movie in range(1, count + 1):
            file.write(
                f"{movie},Film {movie} ({1950 + movie}),{('Action', 'Drama|Comedy')[movie % 2]}\n"
            )
    with zipfile.ZipFile(f"{folder}.zip", "w") as archive:
        for name in ("ratings.csv", "movies.csv"):
            archive.write(f"{folder}/{name}")


def movielens(name: str, split: str, rows: int, users: int = 50, count: int = 60) -> Any:
    """Make a data set like MovieLens's `100k-ratings` or `100k-movies` of tensorflow_datasets."""
    import tensorflow as tf

    del split
    generator = np.random.default_rng(4)
    titles = np.array([f"Film {movie} {WORDS[movie]}" for movie in range(count + 1)])
    genres = generator.integers(0, 20, (count + 1, 2))
    movie = np.arange(1, count + 1)
    if name.endswith("ratings"):
        user, movie = np.arange(rows) % users + 1, generator.integers(1, count + 1, rows)
        liking = np.round((user + movie) % 4 + 1 + generator.normal(0, 0.5, rows))
        age, job = generator.integers(15, 70, users + 1)[user], user % 21
        parts = {
            "user_id": user.astype(str),
            "user_rating": np.clip(liking, 1, 5).astype("float32"),
            "user_gender": user % 2 == 0,
            "user_zip_code": (user % 7).astype(str),
            "user_occupation_label": job.astype("int64"),
            "user_occupation_text": job.astype(str),
            "raw_user_age": age.astype("float32"),
            "bucketized_user_age": (age // 10 * 10.0).astype("float32"),
            "timestamp": np.arange(rows) * 1000,
        }
    else:
        parts = {}
    parts |= {"movie_id": movie.astype(str), "movie_title": titles[movie]}
    return tf.data.Dataset.from_tensor_slices(parts | {"movie_genres": genres[movie]})


class Anything(types.ModuleType):
    """Stands for a module that only shows things, and for all that is in it."""

    __all__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Show it."""
        return Anything("answer")

    def __iter__(self) -> Any:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        """Let errors through."""


def install(spec: dict[str, Any]) -> None:
    """Replace what downloads, by what published_scripts.toml says of a script.

    Args:
        spec: `rows` of a training set; `tfds`, how the set of tensorflow_datasets looks;
            `modules` that only show things; and `prepare`, code that writes files.
    """
    import keras

    for name in (
        "IPython",
        "ipywidgets",
        "pydot",
        "seaborn",
        "tensorflow_docs",
        *spec.get("modules", ()),
    ):
        _stand_for(name)
    rows = spec.get("rows", 300)
    _datasets(keras, rows)
    _show_nothing()
    sys.modules["tensorflow_datasets"] = module = types.ModuleType("tensorflow_datasets")
    module.load = functools.partial(load, spec=spec.get("tfds", {}), rows=rows)
    module.disable_progress_bar = lambda: None
    module.as_numpy = lambda arrays: arrays
    module.Split = types.SimpleNamespace(TRAIN="train", TEST="test", VALIDATION="validation")
    keras.utils.get_file = get_file
    keras.utils.plot_model = lambda *args, **kwargs: None
    # where `from tensorflow.keras import ...` takes it from, which makes modules of its own
    keras.src.utils.file_utils.get_file = get_file
    import tensorflow as tf

    tf.keras.utils.get_file = get_file
    _without_pretraining(keras)
    np.loadtxt = _local(np.loadtxt)
    try:
        import pandas
    except ImportError:
        pass
    else:
        pandas.read_csv = _local(pandas.read_csv)
    here = {
        "np": np,
        "os": os,
        "rows": rows,
        "images": images,
        "sentences": sentences,
        "numbers": numbers,
        "WORDS": WORDS,
        "census": census,
        "heart": heart,
        "movies": movies,
        "movielens": functools.partial(movielens, rows=rows),
    }
    exec(spec.get("prepare", ""), here)


def get_file(fname: str | None = None, origin: str = "", *args: Any, **kwargs: Any) -> str:
    """Return where the code in the table has written a file, in place of downloading it."""
    del args
    path = os.path.abspath(os.path.basename(fname or origin))
    for known in (path, path.split(".")[0]):
        if os.path.exists(known):
            return known
    raise FileNotFoundError(
        f"published_scripts.toml writes no file for {path} ({origin}, {kwargs})"
    )


def _local(read: Any) -> Any:
    """Let a function read the file of an address's name, here."""

    @functools.wraps(read)
    def read_here(path: Any, *args: Any, **kwargs: Any) -> Any:
        path = os.path.basename(path) if "://" in str(path) else path
        return read(path, *args, **kwargs)

    return read_here


def load(
    name: str,
    split: Any = None,
    as_supervised: bool = False,
    with_info: bool = False,
    spec: Any = None,
    rows: int = 300,
    **kwargs: Any,
) -> Any:
    """Stand for `tensorflow_datasets.load`: images and their classes, or texts."""
    import tensorflow as tf

    del name
    batch = kwargs.get("batch_size")

    def one(part: str) -> Any:
        train = str(part).startswith("train")
        count = rows if train else rows // 3
        if "text" in spec:
            texts, labels = sentences(count, spec["text"], seed=int(not train))
            return _pairs(np.array(texts), labels, as_supervised, "text")
        x, y = images(count, tuple(spec["shape"]), spec["classes"], seed=int(not train))
        return _pairs(x, y, as_supervised, "image")

    def _pairs(x: Any, y: Any, supervised: bool, key: str) -> Any:
        y = y.astype("int64")
        parts = (x, y) if supervised else {key: x, "label": y}
        if batch == -1:
            return parts  # arrays, which `as_numpy` leaves as they are
        found = tf.data.Dataset.from_tensor_slices(parts)
        return found.batch(batch) if batch else found

    if isinstance(split, list | tuple):
        found: Any = [one(part) for part in split]
    elif split is None:
        found = {part: one(part) for part in ("train", "test", "validation")}
    else:
        found = one(split)
    info = Anything("info")
    info.features = {
        "image": types.SimpleNamespace(shape=tuple(spec.get("shape", ()))),
        "label": types.SimpleNamespace(
            num_classes=spec.get("classes", spec.get("text")),
            names=[str(n) for n in range(spec.get("classes", 2))],
            int2str=str,
        ),
    }
    info.splits = {part: types.SimpleNamespace(num_examples=rows) for part in ("train", "test")}
    return (found, info) if with_info else found


def _datasets(keras: Any, rows: int) -> None:
    shapes = {
        "mnist": ((28, 28), 10),
        "fashion_mnist": ((28, 28), 10),
        "cifar10": ((32, 32, 3), 10),
        "cifar100": ((32, 32, 3), 100),
    }
    for name, (shape, classes) in shapes.items():
        getattr(keras.datasets, name).load_data = functools.partial(_split, rows, shape, classes)
    keras.datasets.imdb.load_data = functools.partial(_reviews, rows)
    keras.datasets.imdb.get_word_index = lambda: {word: n for n, word in enumerate(WORDS, 1)}
    keras.datasets.reuters.load_data = functools.partial(_newswires, rows)
    keras.datasets.reuters.get_word_index = keras.datasets.imdb.get_word_index
    keras.datasets.boston_housing.load_data = functools.partial(_houses, rows)
    keras.datasets.california_housing.load_data = functools.partial(_houses, rows, columns=8)


def _split(rows: int, shape: tuple[int, ...], classes: int, **kwargs: Any) -> Any:
    del kwargs
    parts = [images(rows, shape, classes, 1), images(rows // 3, shape, classes, 2)]
    deep = len(shape) == 3
    return tuple((x, y[:, None] if deep else y.astype("uint8")) for x, y in parts)


def _reviews(rows: int, num_words: int = 20000, classes: int = 2, **kwargs: Any) -> Any:
    def one(count: int, seed: int) -> Any:
        generator = np.random.default_rng(seed)
        labels = generator.permutation(np.arange(count) % classes)
        texts = [
            list(generator.integers(1, num_words // (1 + label), generator.integers(20, 120)))
            for label in labels
        ]
        return np.array(texts, dtype=object), labels

    return one(rows, 1), one(rows // 3, 2)


def _newswires(rows: int, num_words: int = 20000, **kwargs: Any) -> Any:
    return _reviews(rows, num_words, classes=46)


def _houses(rows: int, columns: int = 13, **kwargs: Any) -> Any:
    del kwargs
    x = numbers(rows + rows // 3, columns)
    y = x @ np.arange(columns) + 20
    return (x[:rows], y[:rows]), (x[rows:], y[rows:])


def _without_pretraining(keras: Any) -> None:
    """Let networks of keras.applications begin at random: their weights cannot be had."""
    for name, make in list(vars(keras.applications).items()):
        if isinstance(make, types.ModuleType):
            for inner, function in list(vars(make).items()):
                if inner[0].isupper() and callable(function):
                    setattr(make, inner, _at_random(function))
        elif name[0].isupper() and callable(make):
            setattr(keras.applications, name, _at_random(make))


def _at_random(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        return make(*args, **{**kwargs, "weights": None})

    return made


def _show_nothing() -> None:
    import matplotlib.pyplot as plt

    plt.show = lambda *args, **kwargs: plt.close("all")


def _stand_for(name: str) -> None:
    import importlib.abc
    import importlib.machinery

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
            if fullname == name or fullname.startswith(f"{name}."):
                return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
            return None

        def create_module(self, spec: Any) -> Any:
            module = Anything(spec.name)
            module.__path__ = []
            module.version_info = (99,)  # for which matplotlib asks IPython
            return module

        def exec_module(self, module: Any) -> None:
            """Leave a module that only shows things as it is."""

    sys.meta_path.insert(0, Finder())
