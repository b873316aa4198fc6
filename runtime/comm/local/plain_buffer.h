#pragma once

#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <new>

#include "runtime/comm/collectives.h"

namespace tessera {

/// A CommBuffer of this process's own memory. It is filled with zeros. It is aligned to cache lines, or to pages if it
/// is at least one page long. A buffer of 2 MiB or more uses huge pages if the kernel grants them. All pages are
/// present from the start.
class PlainBuffer : public CommBuffer {
 public:
  explicit PlainBuffer(std::size_t bytes)
      : alignment_(bytes >= kHugePage ? kHugePage
                   : bytes >= kPage   ? kPage
                                      : kLine),
        data_(static_cast<std::byte*>(::operator new(bytes + 1, std::align_val_t(alignment_))), Delete{alignment_}),
        bytes_(bytes) {
    // a request, which the kernel may refuse
    if (bytes >= kHugePage) madvise(data_.get(), bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
    std::memset(data_.get(), 0, bytes);
  }
  std::byte* data() const override { return data_.get(); }
  std::size_t bytes() const override { return bytes_; }

 private:
  static constexpr std::size_t kLine = 64, kPage = 4096, kHugePage = 2 << 20;
  struct Delete {
    std::size_t alignment;
    void operator()(std::byte* data) const { ::operator delete(data, std::align_val_t(alignment)); }
  };

  const std::size_t alignment_;
  const std::unique_ptr<std::byte[], Delete> data_;
  const std::size_t bytes_;
};

}  // namespace tessera
