// Tests the forwarding of ranks' output, line by line.

#include "workshop/launch/line_forwarder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <random>

namespace tessera {
namespace {

/// Returns the text that a forwarder writes when `body` uses it.
template <typename Body>
std::string written(Body&& body) {
  std::array<int, 2> ends;
  EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  ::fcntl(ends[1], F_SETPIPE_SZ, 1 << 20);
  LineForwarder forwarder(ends[1], "> ");
  body(forwarder);
  ::close(ends[1]);
  std::string text(1 << 20, '\0');
  std::size_t size = 0;
  for (ssize_t got; (got = ::read(ends[0], text.data() + size, text.size() - size)) > 0;)
    size += static_cast<std::size_t>(got);
  ::close(ends[0]);
  text.resize(size);
  return text;
}

TEST(LineForwarder, LineIsForwardedOnceItsEndHasCome) {
  EXPECT_EQ(written([](auto& f) { f.add("half"); }), "");
  EXPECT_EQ(written([](auto& f) { f.add("half"), f.add(" line\nnext"); }), "> half line\n");
  EXPECT_EQ(written([](auto& f) { f.add("half"), f.finish(), f.finish(); }), "> half\n");
  EXPECT_EQ(written([](auto& f) { f.add("\n\n"); }), "> \n> \n");
  EXPECT_EQ(written([](auto& f) { f.add("10%\r20%\r\n"); }), "> 10%\r20%\r\n");
}

TEST(LineForwarder, LinesDoNotDependOnHowTheyArrive) {
  const std::string text = "one\ntwo\n\nthree and more\nfour\n";
  const std::string whole = written([&](auto& f) { f.add(text); });
  std::mt19937 random(7);
  for (int trial = 0; trial < 50; ++trial) {
    const auto cut = written([&](auto& f) {
      for (std::size_t at = 0; at < text.size();) {
        const std::size_t n = random() % 5;
        f.add(std::string_view(text).substr(at, n));
        at += n;
      }
    });
    EXPECT_EQ(cut, whole);
  }
}

TEST(LineForwarder, VeryLongLinesAreCut) {
  const std::string text = written([](auto& f) {
    for (int i = 0; i < 40; ++i) f.add(std::string(5000, 'x'));
    f.finish();
  });
  EXPECT_EQ(std::count(text.begin(), text.end(), 'x'), 200'000);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 4);
}

TEST(LineForwarder, KeepsTheLastTwentyLines) {
  written([](auto& f) {
    for (int i = 0; i < 100; ++i) f.add(std::to_string(i) + "\n");
    EXPECT_EQ(f.last_lines().size(), 20u);
    EXPECT_EQ(f.last_lines().front(), "80");
    EXPECT_EQ(f.last_lines().back(), "99");
  });
}

}  // namespace
}  // namespace tessera
