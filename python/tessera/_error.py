"""The exception of this package."""


class Error(RuntimeError):
    """The exception that Tessera raises. Its text says on which rank and where the error was, what was wanted and what
    was found, with a hint.

    `exit_code` is the exit code of the program if the exception is not caught, after sysexits.h:

        64          a call out of turn or a wrong argument; nothing has happened, and the program can go on
        65          damaged data
        66          no such file
        69          a port or device that cannot be had
        70          an exception of the model's
        71          memory
        73, 74, 77  output that cannot be written
        75          another rank is gone
        78          the strategy file or the launcher's variables are wrong
    """

    def __init__(self, message: str, exit_code: int = 64) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def __reduce__(self):
        return type(self), (str(self), self.exit_code)
