#include "workshop/launch/hosts/frames.h"

namespace tessera {
namespace {

constexpr std::size_t kHeader = 9;                // type, rank, length of the body
constexpr std::uint64_t kLongestBody = 64 << 20;  // a job with all of its arguments has less
constexpr auto kLastType = static_cast<std::uint8_t>(FrameType::kGone);

// Numbers are written with their lowest byte first, whatever the byte order of this machine is.
void put(std::string& bytes, std::uint64_t value, int size) {
  for (int i = 0; i < size; ++i) bytes += static_cast<char>(value >> (8 * i));
}

std::uint64_t get(std::string_view bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i)
    value |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  return value;
}

}  // namespace

std::string encode(const Frame& frame) {
  std::string bytes;
  put(bytes, static_cast<std::uint64_t>(frame.type), 1);
  put(bytes, static_cast<std::uint64_t>(frame.rank), 4);
  put(bytes, frame.body.size(), 4);
  return bytes + frame.body;
}

std::optional<Frame> FrameReader::next() {
  if (broken_ || bytes_.size() < kHeader) return std::nullopt;
  const std::string_view all = bytes_;
  const std::uint64_t type = get(all.substr(0, 1)), length = get(all.substr(5, 4));
  broken_ = type == 0 || type > kLastType || length > kLongestBody;
  if (broken_ || bytes_.size() < kHeader + length) return std::nullopt;
  Frame frame = {static_cast<FrameType>(type), static_cast<int>(get(all.substr(1, 4))),
                 std::string(all.substr(kHeader, length))};
  bytes_.erase(0, kHeader + length);
  return frame;
}

FieldWriter& FieldWriter::number(std::int64_t value) {
  put(bytes_, static_cast<std::uint64_t>(value), 8);
  return *this;
}

FieldWriter& FieldWriter::text(std::string_view value) {
  number(static_cast<std::int64_t>(value.size()));
  bytes_ += value;
  return *this;
}

FieldWriter& FieldWriter::texts(const std::vector<std::string>& values) {
  number(static_cast<std::int64_t>(values.size()));
  for (const std::string& value : values) text(value);
  return *this;
}

std::string_view FieldReader::take(std::uint64_t length) {
  ok_ = ok_ && length <= rest_.size();
  if (!ok_) return {};
  const std::string_view taken = rest_.substr(0, length);
  rest_.remove_prefix(length);
  return taken;
}

std::int64_t FieldReader::number() { return static_cast<std::int64_t>(get(take(8))); }

std::string FieldReader::text() { return std::string(take(static_cast<std::uint64_t>(number()))); }

std::vector<std::string> FieldReader::texts() {
  std::vector<std::string> values;
  for (std::int64_t left = number(); left > 0 && ok_; --left) values.push_back(text());
  return values;
}

}  // namespace tessera
