"""Starts the processes of a job, and starts them again from a warm template when one is lost."""

from ckptkit.launch.launcher import Launcher as Launcher
from ckptkit.launch.logs import OncePrinter as OncePrinter
from ckptkit.launch.policy import ExitCode as ExitCode
from ckptkit.launch.policy import HangPolicy as HangPolicy
from ckptkit.launch.policy import Hooks as Hooks
from ckptkit.launch.policy import Loss as Loss
from ckptkit.launch.policy import RestartPolicy as RestartPolicy
from ckptkit.launch.policy import WarmStart as WarmStart
from ckptkit.launch.policy import Workers as Workers
from ckptkit.launch.policy import free_port as free_port
from ckptkit.launch.policy import next_attempt as next_attempt
