"""Other libraries' names over dtk: `dtk.migrate.horovod` for scripts written for Horovod."""

from dtk.migrate import horovod

__all__ = ["horovod"]
