// Makes the commands of tessera-train a library, for tests that fork a process for each case, because starting LibTorch
// takes longer than most cases. tests/hostile/machine.py loads it.

/// This is `main` of tessera-train, under the name that CMakeLists.txt gives it.
int command_main(int argc, char** argv);

extern "C" int tessera_command(int argc, char** argv) { return command_main(argc, argv); }
