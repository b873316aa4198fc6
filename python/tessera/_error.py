"""The exception of this package."""


class Error(RuntimeError):
    """The exception that Tessera raises. Its text says on which rank and in which place the error was, what was
    expected and what was found. It also has a hint.

    `exit_code` is the exit code of the program if the exception is not caught. The codes are those of sysexits.h:

        64          a call at the wrong time or a wrong argument; nothing has happened, and the program can continue
        65          damaged data
        66          a file does not exist
        69          a port or device that is not available
        70          an exception in the model's code
        71          not enough memory
        73, 74, 77  output cannot be written
        75          another rank has ended or is lost
        78          the strategy file or the launcher's variables are wrong
    """

    def __init__(self, message: str, exit_code: int = 64) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def __reduce__(self):
        return type(self), (str(self), self.exit_code)
