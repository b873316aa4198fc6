#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "offload/output_file.h"

namespace caffe2::serialize {
class PyTorchStreamWriter;
}

namespace tessera {

/// Writes a dictionary from names to tensors in the format of torch.save, one tensor at a time, so that no two need be in
/// memory together. A file of that kind is a zip archive: the pickled dictionary, which names a record for each tensor's
/// values, and the records, in any order.
///
/// The first error of the file stays (`finish` returns it); what is added after it is dropped.
class WeightsWriter {
 public:
  /// Entries are (name, tensor), of which only shapes and dtypes are read. The same tensor under two names has one record.
  WeightsWriter(OutputFile file, const std::vector<std::pair<std::string, at::Tensor>>& entries);
  ~WeightsWriter();
  WeightsWriter(const WeightsWriter&) = delete;
  WeightsWriter& operator=(const WeightsWriter&) = delete;

  /// The values of `tensor`, one of the entries'. Once each.
  void add(const at::Tensor& tensor);
  /// REQUIRES: all values were added.
  absl::Status finish(Existing existing);

 private:
  OutputFile file_;
  absl::Status status_;
  std::vector<at::Tensor> tensors_;  ///< [record]
  std::unique_ptr<caffe2::serialize::PyTorchStreamWriter> archive_;
};

}  // namespace tessera
