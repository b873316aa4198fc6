#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "offload/files/output_file.h"
#include "tessera/weights.h"

namespace caffe2::serialize {
class PyTorchStreamWriter;
}

namespace tessera {

/// Writes a module's weights in a format of PyTorch, one tensor at a time, so that no two tensors need to be in memory
/// together. save_weights uses a WeightsWriter on rank 0. A file of either form is a zip archive. It has records with
/// the values of tensors, in any order, and a pickle, which names the record of each tensor. A file of kArchive also
/// has code, which C++ needs to read modules: the classes of a TorchScript program, without methods.
///
/// `finish` returns the first error of the file; tensors added after an error are dropped.
class WeightsWriter {
 public:
  /// The constructor reads only names, shapes and dtypes of `module`. A tensor with two names has one record.
  WeightsWriter(OutputFile file, const torch::nn::Module& module, WeightsForm form);
  ~WeightsWriter();
  WeightsWriter(const WeightsWriter&) = delete;
  WeightsWriter& operator=(const WeightsWriter&) = delete;

  /// Writes the values of `tensor`, a parameter or buffer of the module. It is called once for each tensor.
  void add(const at::Tensor& tensor);
  /// Completes the file and moves it to its path. Errors: the first error of `add`, and those of OutputFile::finish.
  /// REQUIRES: all values were added.
  absl::Status finish(Existing existing);

 private:
  /// Returns the tensor that is pickled instead of `tensor`: contiguous, with the same shape and dtype, and without
  /// memory.
  at::Tensor placeholder_for(const at::Tensor& tensor);
  c10::IValue dictionary_of(const torch::nn::Module& module);
  c10::IValue archive_of(const torch::nn::Module& module);
  void write(const std::string& record, const std::string& bytes);

  OutputFile file_;
  absl::Status status_;
  std::unique_ptr<caffe2::serialize::PyTorchStreamWriter> archive_;
  std::vector<std::pair<at::Tensor, at::Tensor>> placeholders_;  ///< tensors of the module, with their placeholders
  std::vector<at::Tensor> tensors_;                              ///< [record]: tensor of the module
};

}  // namespace tessera
