#include <unistd.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <optional>
#include <type_traits>
#include <utility>

#include "runtime/base/crc32c.h"
#include "runtime/base/metrics/metrics_form.h"

// The format of TensorFlow's event files. A record (TFRecord), in little endian, is
//   length of data, uint64 | masked CRC-32C of the length, uint32 | data | masked CRC-32C of the data, uint32
//
// Its data is an Event of TensorFlow's event.proto, in the wire format of Protocol Buffers:
//
//   Event       1 wall_time: double, 2 step: int64, 3 file_version: string, 5 summary: Summary,
//               7 session_log: SessionLog
//   Summary     1 value: repeated Value
//   Value       1 tag: string, 2 simple_value: float
//   SessionLog  1 status: enum, START = 1

namespace tessera {
namespace {

/// Returns `value` as `bytes` bytes, the lowest first.
std::string little_endian(std::uint64_t value, std::size_t bytes) {
  std::string text;
  for (std::size_t i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i) & 0xFF);
  return text;
}

std::uint32_t masked_crc(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xA282EAD8; }

std::string record_of(const std::string& data) {
  const std::string length = little_endian(data.size(), 8);
  return length + little_endian(masked_crc(length), 4) + data + little_endian(masked_crc(data), 4);
}

/// A message of Protocol Buffers, field by field.
class WireMessage {
 public:
  WireMessage& add_integer(int field, std::uint64_t value) {
    add_varint(static_cast<std::uint64_t>(field) << 3);
    return add_varint(value);
  }
  WireMessage& add_double(int field, double value) {
    add_varint(static_cast<std::uint64_t>(field) << 3 | 1);
    bytes_ += little_endian(std::bit_cast<std::uint64_t>(value), 8);
    return *this;
  }
  WireMessage& add_bytes(int field, std::string_view value) {
    add_varint(static_cast<std::uint64_t>(field) << 3 | 2);
    add_varint(value.size());
    bytes_ += value;
    return *this;
  }
  WireMessage& add_float(int field, float value) {
    add_varint(static_cast<std::uint64_t>(field) << 3 | 5);
    bytes_ += little_endian(std::bit_cast<std::uint32_t>(value), 4);
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  WireMessage& add_varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>((value & 0x7F) | 0x80);
    bytes_ += static_cast<char>(value);
    return *this;
  }

  std::string bytes_;
};

WireMessage event_now() {
  const std::chrono::duration<double> time = std::chrono::system_clock::now().time_since_epoch();
  return WireMessage().add_double(1, time.count());
}

std::optional<float> scalar_of(const Metric& metric) {
  return std::visit(
      [](const auto& value) -> std::optional<float> {
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::string>)
          return std::nullopt;
        else
          return static_cast<float>(value);
      },
      metric.value);
}

class Events final : public MetricsForm {
 public:
  explicit Events(bool goes_on) : forgets_(goes_on) {}

  std::string beginning() const override { return record_of(event_now().add_bytes(3, "brain.Event:2").bytes()); }

  absl::StatusOr<std::string> bytes_of(const std::vector<Metric>& metrics) override {
    std::uint64_t step = 0;
    WireMessage summary;
    for (const Metric& metric : metrics) {
      if (metric.name == "step" && std::holds_alternative<std::int64_t>(metric.value)) {
        step = static_cast<std::uint64_t>(std::get<std::int64_t>(metric.value));
      } else if (const std::optional<float> scalar = scalar_of(metric)) {
        summary.add_bytes(1, WireMessage().add_bytes(1, metric.name).add_float(2, *scalar).bytes());
      }
    }
    std::string records;
    if (std::exchange(forgets_, false)) {
      const std::string start = WireMessage().add_integer(1, 1).bytes();
      records = record_of(event_now().add_integer(2, step).add_bytes(7, start).bytes());
    }
    return records + record_of(event_now().add_integer(2, step).add_bytes(5, summary.bytes()).bytes());
  }

 private:
  bool forgets_;  ///< whether the next event makes TensorBoard forget steps of earlier files
};

}  // namespace

std::unique_ptr<MetricsForm> event_form(bool goes_on) { return std::make_unique<Events>(goes_on); }

std::string event_file_name() {
  static std::atomic<int> files{0};
  char host[256] = "host";
  ::gethostname(host, sizeof host - 1);
  const auto seconds =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  return "events.out.tfevents." + std::to_string(seconds) + "." + host + "." + std::to_string(::getpid()) + "." +
         std::to_string(files++);
}

}  // namespace tessera
