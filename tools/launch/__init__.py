"""Starts the processes of a job on this machine, and starts them again when one is lost."""

from tools.launch.launcher import Launcher as Launcher
from tools.launch.policy import ExitCode as ExitCode
from tools.launch.policy import Loss as Loss
from tools.launch.policy import RestartPolicy as RestartPolicy
from tools.launch.printer import OncePrinter as OncePrinter
