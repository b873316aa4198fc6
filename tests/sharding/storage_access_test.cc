// Tests the error that code gets if it accesses the memory of a released storage.

#include "runtime/torch/storage_access.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

/// Returns the ways in which code accesses memory.
std::vector<std::function<void(const at::Tensor&)>> all_reads() {
  return {[](const at::Tensor& t) { (void)t.data_ptr(); },
          [](const at::Tensor& t) { (void)t.const_data_ptr<float>(); },
          [](const at::Tensor& t) { (void)t.mutable_data_ptr<float>(); },
          [](const at::Tensor& t) { (void)t.accessor<float, 1>(); },
          [](const at::Tensor& t) { (void)t.add(1.0); },
          [](const at::Tensor& t) { t.zero_(); }};
}

std::string refusal_of(const std::function<void(const at::Tensor&)>& read, const at::Tensor& tensor) {
  try {
    read(tensor);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "it was read";
}

c10::StorageImpl& storage_of(const at::Tensor& tensor) { return *tensor.storage().unsafeGetStorageImpl(); }

TEST(StorageAccess, EveryReadOfRefusedMemoryGetsTheText) {
  const at::Tensor tensor = at::arange(5, at::kFloat), view = tensor.narrow(0, 1, 3);
  set_refusal(storage_of(tensor), "unit 7 is away");
  refuse_access(storage_of(tensor), true);
  for (const auto& read : all_reads()) {
    EXPECT_THAT(refusal_of(read, tensor), HasSubstr("unit 7 is away"));
    EXPECT_THAT(refusal_of(read, view), HasSubstr("unit 7 is away"));
  }
}

TEST(StorageAccess, TextAloneRefusesNothing) {
  const at::Tensor tensor = at::arange(5, at::kFloat);
  set_refusal(storage_of(tensor), "unit 7 is away");
  for (const auto& read : all_reads()) EXPECT_EQ(refusal_of(read, tensor), "it was read");
}

TEST(StorageAccess, AccessAllowedAgainFindsTheValues) {
  const at::Tensor tensor = at::arange(5, at::kFloat);
  set_refusal(storage_of(tensor), "unit 7 is away");
  for (int time = 0; time < 3; ++time) {
    refuse_access(storage_of(tensor), true);
    EXPECT_THAT(refusal_of(all_reads()[0], tensor), HasSubstr("unit 7 is away"));
    refuse_access(storage_of(tensor), false);
    EXPECT_TRUE(at::equal(tensor, at::arange(5, at::kFloat)));
  }
  for (const auto& read : all_reads()) EXPECT_EQ(refusal_of(read, tensor), "it was read");
}

TEST(StorageAccess, LaterTextReplacesTheFirst) {
  const at::Tensor tensor = at::arange(5, at::kFloat);
  set_refusal(storage_of(tensor), "unit 7 is away");
  refuse_access(storage_of(tensor), true);
  set_refusal(storage_of(tensor), "unit 7 is lost");
  EXPECT_THAT(refusal_of(all_reads()[0], tensor), HasSubstr("unit 7 is lost"));
}

}  // namespace
}  // namespace tessera::testing
