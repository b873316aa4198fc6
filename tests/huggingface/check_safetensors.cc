// Reports for each file that stdin names whether TensorFiles opens it. The program prints "ok" or "no".
// safetensors_verdicts_test.py runs the program.

#include <iostream>
#include <string>

#include "checkpoint/tensor_files.h"

int main() {
  for (std::string path; std::getline(std::cin, path);)
    std::cout << (tessera::TensorFiles::open(path, "check").ok() ? "ok" : "no") << "\n";
}
