// Turns the commands of tessera-train into a library, for tests that fork a process for each case. Starting LibTorch
// takes longer than most cases. tests/hostile/machine.py loads the library.

/// This is `main` of tessera-train, under the name that CMakeLists.txt gives it.
int command_main(int argc, char** argv);

extern "C" int tessera_command(int argc, char** argv) { return command_main(argc, argv); }
