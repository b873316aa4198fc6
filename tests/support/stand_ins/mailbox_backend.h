#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <tuple>
#include <utility>
#include <vector>

namespace tessera::testing {

/// The messages that all ranks of a MailboxBackend share.
struct Mailboxes {
  using Key = std::tuple<int, int, int>;  // sender, receiver, tag
  std::mutex mutex;
  std::condition_variable changed;
  std::map<Key, std::deque<std::vector<char>>> letters;
  std::set<int> gone;  ///< ranks that send no more messages
};

/// Sends point-to-point messages between threads of this process, as Gloo does. The first message sent is the first
/// message received. The memory that receives it may be larger than the message. A wait for a rank whose backend no
/// longer exists fails immediately. The backend counts the messages that its rank sends.
class MailboxBackend : public c10d::Backend {
 public:
  MailboxBackend(int rank, int size, std::shared_ptr<Mailboxes> mailboxes)
      : Backend(rank, size), mailboxes_(std::move(mailboxes)) {}
  ~MailboxBackend() override {
    const std::lock_guard lock(mailboxes_->mutex);
    mailboxes_->gone.insert(getRank());
    mailboxes_->changed.notify_all();
  }

  const std::string getBackendName() const override { return "mailbox"; }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    const auto* const data = static_cast<const char*>(tensors[0].const_data_ptr());
    const std::lock_guard lock(mailboxes_->mutex);
    mailboxes_->letters[{getRank(), to, tag}].emplace_back(data, data + tensors[0].nbytes());
    mailboxes_->changed.notify_all();
    ++messages;
    bytes += tensors[0].nbytes();
    return c10::make_intrusive<Sent>();
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    return c10::make_intrusive<Received>(mailboxes_, Mailboxes::Key{from, getRank(), tag}, tensors[0]);
  }

  std::size_t messages = 0, bytes = 0;  ///< the number of messages and bytes that were sent

 private:
  struct Sent : c10d::Work {
    bool wait(std::chrono::milliseconds) override { return true; }
    void abort() override {}
  };
  class Received : public c10d::Work {
   public:
    Received(std::shared_ptr<Mailboxes> mailboxes, Mailboxes::Key key, at::Tensor to)
        : mailboxes_(std::move(mailboxes)), key_(std::move(key)), to_(std::move(to)) {}
    bool wait(std::chrono::milliseconds timeout) override {
      std::unique_lock lock(mailboxes_->mutex);
      auto& letters = mailboxes_->letters[key_];
      const auto is_gone = [&] { return mailboxes_->gone.contains(std::get<0>(key_)); };
      if (!mailboxes_->changed.wait_for(lock, timeout, [&] { return is_aborted_ || !letters.empty() || is_gone(); }))
        throw std::runtime_error("no message in time");
      if (is_aborted_) return false;
      if (letters.empty()) throw std::runtime_error("the sender is gone");
      if (letters.front().size() > to_.nbytes())
        throw std::runtime_error("a message that is longer than its receiver wants");
      std::memcpy(to_.data_ptr(), letters.front().data(), letters.front().size());
      letters.pop_front();
      return true;
    }
    void abort() override {
      const std::lock_guard lock(mailboxes_->mutex);
      is_aborted_ = true;
      mailboxes_->changed.notify_all();
    }

   private:
    const std::shared_ptr<Mailboxes> mailboxes_;
    const Mailboxes::Key key_;
    const at::Tensor to_;
    bool is_aborted_ = false;  // the mutex of the mailboxes guards this
  };

  const std::shared_ptr<Mailboxes> mailboxes_;
};

}  // namespace tessera::testing
