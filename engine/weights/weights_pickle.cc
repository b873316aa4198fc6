#include "engine/weights/weights_pickle.h"

#include <absl/status/status.h>

#include <algorithm>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

#include "engine/weights/little_endian.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

// This file works as follows. Reader executes the pickle's instructions (Python's pickletools lists them); `step`
// executes one. The Reader accepts only the few instructions that PyTorch writes. It never calls a function that the
// pickle names. `called` makes the results of the functions that rebuild tensors, and makes every other object a Value
// of kind kOther. Containers belong to the Reader, so a container may contain itself. When the pickle stops, Tree
// starts from the pickle's value and makes the WeightsNodes, within bounds on their number and depth.

constexpr std::size_t kLongestKey = 200;  ///< number of characters of a name that messages repeat
constexpr int kDeepestTuple = 20;         ///< largest depth of tuples inside tuples
constexpr std::size_t kMostDimensions = 64;

struct Storage {
  std::string record, type;
  std::int64_t numel = 0;
  bool is_untyped = false;
};
struct Value;
struct Tuple {
  std::vector<Value> items;
  int depth = 1;
};
struct Container;

/// A value on the pickle's stack.
struct Value {
  enum Kind { kOther, kNone, kNumber, kText, kTuple, kContainer, kName, kStorage, kTensor } kind = kOther;
  std::int64_t number = 0;
  /// kText: the text; kName: module and name, such as "torch._utils _rebuild_tensor_v2"; kOther: a description
  std::string text = {};
  std::shared_ptr<const Tuple> tuple = {};
  std::shared_ptr<const Storage> storage = {};
  std::shared_ptr<const PickledTensor> tensor = {};
  Container* container = nullptr;
};

/// A dictionary, a list or a module. A container may be inside another container, and inside itself. The Reader owns
/// all containers.
struct Container {
  WeightsNode::Kind kind = WeightsNode::Kind::kDictionary;
  std::vector<std::pair<std::string, Value>> entries = {};  ///< names and values; a list has no names
  const Container* state = nullptr;                         ///< a module's dictionary of attributes

  const std::vector<std::pair<std::string, Value>>& items() const { return state ? state->entries : entries; }
};

std::string describe(const Value& value) {
  switch (value.kind) {
    case Value::kNone:
      return "None";
    case Value::kNumber:
      return "a number";
    case Value::kText:
      return "a text";
    case Value::kTuple:
      return "a tuple";
    case Value::kContainer:
      return std::string(value.container->kind == WeightsNode::Kind::kList ? "a list" : "a dictionary") + " of " +
             counted(value.container->items().size(), "entry", "entries");
    case Value::kName:
      return clipped(value.text, kLongestKey);
    case Value::kStorage:
      return "a storage";
    case Value::kTensor:
      return "a tensor";
    case Value::kOther:
      break;
  }
  return value.text.empty() ? "another object" : clipped(value.text, kLongestKey);
}

Value number(std::int64_t value) { return {.kind = Value::kNumber, .number = value}; }
Value other(std::string what) { return {.kind = Value::kOther, .text = std::move(what)}; }
Value text_value(std::string_view text) { return {.kind = Value::kText, .text = std::string(text)}; }

absl::Status damaged(const std::string& what) {
  return make_error(
      ExitCode::kCorruptData,
      what + ". [T0347] hint: write it anew with save_weights, or with torch.save(model.state_dict(), path)");
}

std::optional<std::vector<std::int64_t>> numbers_of(const Value& value) {
  if (value.kind != Value::kTuple) return std::nullopt;
  std::vector<std::int64_t> numbers;
  for (const Value& item : value.tuple->items) {
    if (item.kind != Value::kNumber) return std::nullopt;
    numbers.push_back(item.number);
  }
  return numbers;
}

/// Returns the tensor that torch._utils._rebuild_tensor would make. The arguments are storage, offset, sizes and
/// strides. The function _v2 has further arguments behind them. The argument of _v3 with index 6 is the dtype. Returns
/// nothing for other arguments.
std::optional<Value> rebuilt_tensor(const std::string& function, const std::vector<Value>& arguments) {
  const bool names_type = function.ends_with("_v3");
  if (arguments.size() < (names_type ? 7 : 4) || arguments[0].kind != Value::kStorage ||
      arguments[1].kind != Value::kNumber)
    return std::nullopt;
  // The arguments from index 4 on are hooks and attributes. Attributes such as "conj" change the values, so such
  // tensors are refused.
  for (std::size_t i = 4; i < arguments.size(); ++i) {
    if (arguments[i].kind == Value::kContainer && !arguments[i].container->items().empty()) return std::nullopt;
  }
  const auto sizes = numbers_of(arguments[2]), strides = numbers_of(arguments[3]);
  if (!sizes || !strides || sizes->size() != strides->size() || sizes->size() > kMostDimensions) return std::nullopt;
  const Storage& storage = *arguments[0].storage;
  PickledTensor tensor{storage.record,      storage.type, storage.numel, storage.is_untyped,
                       arguments[1].number, *sizes,       *strides};
  if (names_type) {
    if (arguments[6].kind != Value::kName || !arguments[6].text.starts_with("torch ")) return std::nullopt;
    tensor.type = arguments[6].text.substr(6);
  }
  return Value{.kind = Value::kTensor, .tensor = std::make_shared<const PickledTensor>(std::move(tensor))};
}

/// Returns the value that a call of the function would return. For an unknown function it is a value of kind kOther.
absl::StatusOr<Value> called(const Value& function, const Value& arguments, int depth = 0) {
  if (function.kind != Value::kName || arguments.kind != Value::kTuple) return other("another object");
  const std::string& name = function.text;
  const std::vector<Value>& items = arguments.tuple->items;
  if (name.starts_with("torch._utils _rebuild_tensor")) {
    const auto tensor = rebuilt_tensor(name, items);
    if (!tensor) return damaged("a tensor in it has other arguments than torch.save writes");
    return *tensor;
  }
  const bool keeps_its_argument =
      name.starts_with("torch._utils _rebuild_parameter") || name.starts_with("torch.jit._pickle ");
  if (keeps_its_argument && !items.empty()) return items[0];
  if (name == "torch._tensor _rebuild_from_type_v2" && items.size() >= 3 && depth == 0)
    return called(items[0], items[2], depth + 1);
  if (name == "torch Size" && items.size() == 1) return items[0];
  if (name == "torch._utils _rebuild_sparse_tensor") return other("a sparse tensor");
  if (name == "torch._utils _rebuild_qtensor") return other("a quantized tensor");
  if (name == "torch._utils _rebuild_meta_tensor_no_storage") return other("a tensor without values (on device meta)");
  return other("an object of the class " + name.substr(name.find(' ') + 1));
}

/// Makes the tree of WeightsNodes in one walk from the root. A value that occurs at several places becomes a node at
/// each of them, within the bounds of WeightsNode.
class Tree {
 public:
  absl::StatusOr<PickledWeights> of(const Value& root) {
    if (root.kind != Value::kContainer) return no_container(root);
    TESSERA_RETURN_IF_ERROR(add(root, weights_.root, 0));
    return std::move(weights_);
  }
  void mark_as_program() { weights_.is_program = true; }

 private:
  static absl::Status no_container(const Value& root) {
    const std::string what = "it holds " + describe(root) + ", not a dictionary from names to tensors";
    if (root.kind == Value::kOther && root.text.starts_with("an object"))
      return make_error(ExitCode::kCorruptData,
                        what +
                            ". [T0348] hint: torch.save(model, path) writes the program's class, which is not read; "
                            "write torch.save(model.state_dict(), path)");
    return damaged(what);
  }

  absl::Status add(const Value& value, WeightsNode& node, int depth) {
    if (++nodes_ > WeightsNode::kMost)
      return damaged("it has more than " + std::to_string(WeightsNode::kMost) + " entries");
    if (value.kind == Value::kTensor) {
      const auto [known, is_new] = numbers_.try_emplace(value.tensor.get(), weights_.tensors.size());
      if (is_new) weights_.tensors.push_back(*value.tensor);
      node.kind = WeightsNode::Kind::kTensor;
      node.tensor = known->second;
      return absl::OkStatus();
    }
    if (value.kind != Value::kContainer) {
      node.what = describe(value);
      return absl::OkStatus();
    }
    if (depth == WeightsNode::kDeepest)
      return damaged("it nests dictionaries deeper than " + std::to_string(WeightsNode::kDeepest));
    node.kind = value.container->kind;
    const bool is_list = node.kind == WeightsNode::Kind::kList;
    for (const auto& [name, entry] : value.container->items()) {
      // The flag "training" shows that the module was scripted or traced.
      if (node.kind == WeightsNode::Kind::kModule && name == "training") weights_.is_program = true;
      node.entries.push_back({.name = is_list ? std::to_string(node.entries.size()) : name});
      TESSERA_RETURN_IF_ERROR(add(entry, node.entries.back(), depth + 1));
    }
    return absl::OkStatus();
  }

  PickledWeights weights_;
  std::unordered_map<const PickledTensor*, std::size_t> numbers_;
  std::size_t nodes_ = 0;
};

class Reader {
 public:
  explicit Reader(std::string_view pickle) : rest_(pickle) {}

  absl::StatusOr<PickledWeights> run() {
    while (!stopped_) {
      TESSERA_ASSIGN_OR_RETURN(const std::string_view code, take(1));
      TESSERA_RETURN_IF_ERROR(step(static_cast<unsigned char>(code[0])));
    }
    TESSERA_ASSIGN_OR_RETURN(const Value value, pop());
    return tree_.of(value);
  }

 private:
  absl::StatusOr<std::string_view> take(std::size_t bytes) {
    if (bytes > rest_.size()) return damaged("its pickle is cut short");
    const std::string_view taken = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return taken;
  }

  /// Reads a number whose lowest byte comes first.
  absl::StatusOr<std::uint64_t> unsigned_of(std::size_t bytes) {
    TESSERA_ASSIGN_OR_RETURN(const std::string_view taken, take(bytes));
    return little_endian(taken);
  }

  absl::StatusOr<std::string_view> counted(std::size_t bytes_of_count) {
    TESSERA_ASSIGN_OR_RETURN(const std::uint64_t bytes, unsigned_of(bytes_of_count));
    return take(bytes);
  }

  absl::StatusOr<std::string_view> line() {
    const std::size_t end = rest_.find('\n');
    if (end == std::string_view::npos) return damaged("its pickle is cut short");
    const std::string_view found = rest_.substr(0, end);
    rest_.remove_prefix(end + 1);
    return found;
  }

  absl::StatusOr<Value> pop() {
    const std::size_t floor = marks_.empty() ? 0 : marks_.back();
    if (stack_.size() <= floor) return damaged("its pickle takes more than it has put down");
    Value value = std::move(stack_.back());
    stack_.pop_back();
    return value;
  }

  absl::StatusOr<Value*> top() {
    const std::size_t floor = marks_.empty() ? 0 : marks_.back();
    if (stack_.size() <= floor) return damaged("its pickle takes more than it has put down");
    return &stack_.back();
  }

  absl::StatusOr<std::vector<Value>> pop_to_mark() {
    if (marks_.empty()) return damaged("its pickle takes more than it has put down");
    const auto begin = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<Value> items(std::make_move_iterator(begin), std::make_move_iterator(stack_.end()));
    stack_.erase(begin, stack_.end());
    marks_.pop_back();
    return items;
  }

  absl::Status push_container(WeightsNode::Kind kind) {
    return push({.kind = Value::kContainer, .container = &containers_.emplace_back(Container{.kind = kind})});
  }

  absl::Status push(Value value) {
    stack_.push_back(std::move(value));
    return absl::OkStatus();
  }

  absl::Status push_tuple(std::vector<Value> items) {
    int depth = 1;
    for (const Value& item : items)
      if (item.kind == Value::kTuple) depth = std::max(depth, item.tuple->depth + 1);
    if (depth > kDeepestTuple) return damaged("its pickle nests tuples deeper than torch.save does");
    return push({.kind = Value::kTuple, .tuple = std::make_shared<const Tuple>(Tuple{std::move(items), depth})});
  }

  absl::Status push_tuple_of(std::size_t count) {
    std::vector<Value> items(count);
    for (std::size_t i = count; i-- > 0;) {
      TESSERA_ASSIGN_OR_RETURN(items[i], pop());
    }
    return push_tuple(std::move(items));
  }

  absl::Status put(std::uint64_t place) {
    TESSERA_ASSIGN_OR_RETURN(const Value* value, top());
    memo_[place] = *value;
    return absl::OkStatus();
  }

  absl::Status get(std::uint64_t place) {
    const auto found = memo_.find(place);
    if (found == memo_.end()) return damaged("its pickle names an object that it does not have");
    return push(found->second);
  }

  absl::Status push_number(std::size_t bytes) {
    TESSERA_ASSIGN_OR_RETURN(const std::uint64_t value, unsigned_of(bytes));
    return push(number(static_cast<std::int64_t>(value)));
  }

  absl::Status push_int() {
    TESSERA_ASSIGN_OR_RETURN(const std::uint64_t value, unsigned_of(4));
    return push(number(static_cast<std::int32_t>(static_cast<std::uint32_t>(value))));
  }

  /// Pushes a number of any length, in two's complement. A number of more than 64 bits cannot describe a tensor.
  absl::Status push_long() {
    TESSERA_ASSIGN_OR_RETURN(const std::string_view bytes, counted(1));
    if (bytes.size() > 8) return push(other("a number of more than 64 bits"));
    std::uint64_t value = !bytes.empty() && (bytes.back() & 0x80) ? ~std::uint64_t{0} : 0;
    for (std::size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
    return push(number(static_cast<std::int64_t>(value)));
  }

  absl::Status push_text(std::size_t bytes_of_count) {
    TESSERA_ASSIGN_OR_RETURN(const std::string_view text, counted(bytes_of_count));
    return push(text_value(text));
  }

  absl::Status push_bytes(std::size_t bytes_of_count) {
    TESSERA_RETURN_IF_ERROR(counted(bytes_of_count).status());
    return push(other("bytes"));
  }

  static std::string name_of_key(const Value& key) {
    if (key.kind == Value::kText) return key.text;
    return key.kind == Value::kNumber ? std::to_string(key.number) : "a key that is " + describe(key);
  }

  absl::Status set_items(std::vector<Value> items) {
    TESSERA_ASSIGN_OR_RETURN(const Value* value, top());
    if (items.size() % 2 != 0) return damaged("its pickle has a key without a value");
    if (value->kind != Value::kContainer || value->container->kind != WeightsNode::Kind::kDictionary)
      return absl::OkStatus();  // the items belong to an object of kind kOther, which is not read
    for (std::size_t i = 0; i < items.size(); i += 2)
      value->container->entries.emplace_back(name_of_key(items[i]), std::move(items[i + 1]));
    return absl::OkStatus();
  }

  absl::Status append(std::vector<Value> items) {
    TESSERA_ASSIGN_OR_RETURN(const Value* value, top());
    if (value->kind != Value::kContainer || value->container->kind != WeightsNode::Kind::kList) return absl::OkStatus();
    for (Value& item : items) value->container->entries.emplace_back("", std::move(item));
    return absl::OkStatus();
  }

  absl::Status append_one_item() {
    std::vector<Value> items(1);
    TESSERA_ASSIGN_OR_RETURN(items[0], pop());
    return append(std::move(items));
  }

  /// Sets attributes of an object. The object lies below the attributes on the stack. Attributes of a module are its
  /// tensors and modules; those of a dictionary, such as the _metadata of a state_dict, are dropped.
  absl::Status build() {
    TESSERA_ASSIGN_OR_RETURN(const Value state, pop());
    TESSERA_ASSIGN_OR_RETURN(const Value* value, top());
    const bool is_module = value->kind == Value::kContainer && value->container->kind == WeightsNode::Kind::kModule;
    if (is_module && state.kind == Value::kContainer) value->container->state = state.container;
    return absl::OkStatus();
  }

  absl::Status push_name() {
    TESSERA_ASSIGN_OR_RETURN(const std::string_view module, line());
    TESSERA_ASSIGN_OR_RETURN(const std::string_view name, line());
    return push({.kind = Value::kName, .text = std::string(module) + " " + std::string(name)});
  }

  absl::Status push_name_of_stack() {
    TESSERA_ASSIGN_OR_RETURN(const Value name, pop());
    TESSERA_ASSIGN_OR_RETURN(const Value module, pop());
    return push({.kind = Value::kName, .text = module.text + " " + name.text});
  }

  /// Pushes a storage whose values are in a record: ("storage", class, record, device, elements).
  absl::Status push_storage() {
    TESSERA_ASSIGN_OR_RETURN(const Value id, pop());
    if (id.kind != Value::kTuple || id.tuple->items.size() < 5)
      return damaged("a storage in it is not as torch.save writes it");
    const std::vector<Value>& items = id.tuple->items;
    if (items[0].text != "storage" || items[1].kind != Value::kName || items[2].kind != Value::kText ||
        items[4].kind != Value::kNumber)
      return damaged("a storage in it is not as torch.save writes it");
    Storage storage{items[2].text, items[1].text.substr(items[1].text.find(' ') + 1), items[4].number};
    storage.is_untyped = storage.type == "UntypedStorage";
    return push({.kind = Value::kStorage, .storage = std::make_shared<const Storage>(std::move(storage))});
  }

  /// Pushes a module. torch::save writes "__torch__.Module" or "__torch__.___torch_mangle_1.Module" as the name of each
  /// module's class. A module whose class has another name was scripted.
  absl::Status push_module(const std::string& name) {
    if (!name.ends_with(" Module")) tree_.mark_as_program();
    return push_container(WeightsNode::Kind::kModule);
  }

  absl::Status call() {
    TESSERA_ASSIGN_OR_RETURN(const Value arguments, pop());
    TESSERA_ASSIGN_OR_RETURN(const Value function, pop());
    if (function.kind == Value::kName &&
        (function.text == "collections OrderedDict" || function.text == "collections defaultdict"))
      return push_container(WeightsNode::Kind::kDictionary);
    if (function.kind == Value::kName && function.text.starts_with("__torch__")) return push_module(function.text);
    TESSERA_ASSIGN_OR_RETURN(Value result, called(function, arguments));
    return push(std::move(result));
  }

  absl::Status drop(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) TESSERA_RETURN_IF_ERROR(pop().status());
    return absl::OkStatus();
  }

  absl::Status set_one_item() {
    TESSERA_ASSIGN_OR_RETURN(Value value, pop());
    TESSERA_ASSIGN_OR_RETURN(Value key, pop());
    std::vector<Value> items;
    items.push_back(std::move(key));
    items.push_back(std::move(value));
    return set_items(std::move(items));
  }

  absl::Status step(unsigned char code) {
    switch (code) {
      case 0x80:
        return take(1).status();  // PROTO
      case 0x95:
        return take(8).status();  // FRAME
      case '.':
        stopped_ = true;
        return absl::OkStatus();
      case '(':
        marks_.push_back(stack_.size());
        return absl::OkStatus();
      case '0':
        return drop(1);
      case '1':
        return pop_to_mark().status();
      case '2': {
        TESSERA_ASSIGN_OR_RETURN(const Value* value, top());
        return push(Value(*value));
      }
      case 'N':
        return push({.kind = Value::kNone});
      case 0x88:
        return push(number(1));  // NEWTRUE
      case 0x89:
        return push(number(0));  // NEWFALSE
      case 'J':
        return push_int();
      case 'K':
        return push_number(1);
      case 'M':
        return push_number(2);
      case 0x8a:
        return push_long();
      case 'G':
        TESSERA_RETURN_IF_ERROR(take(8).status());
        return push(other("a number with a fraction"));
      case 'X':
        return push_text(4);
      case 0x8c:
        return push_text(1);
      case 0x8d:
        return push_text(8);
      case 'U':
        return push_text(1);
      case 'T':
        return push_text(4);
      case 'B':
        return push_bytes(4);
      case 'C':
        return push_bytes(1);
      case 0x8e:
        return push_bytes(8);
      case ']':
        return push_container(WeightsNode::Kind::kList);
      case 0x8f:
        return push(other("a set"));
      case 'a':
        return append_one_item();
      case 'e': {
        TESSERA_ASSIGN_OR_RETURN(std::vector<Value> items, pop_to_mark());
        return append(std::move(items));
      }
      case 0x90:
        return pop_to_mark().status();  // ADDITEMS
      case ')':
        return push_tuple({});
      case 't': {
        TESSERA_ASSIGN_OR_RETURN(std::vector<Value> items, pop_to_mark());
        return push_tuple(std::move(items));
      }
      case 0x85:
        return push_tuple_of(1);
      case 0x86:
        return push_tuple_of(2);
      case 0x87:
        return push_tuple_of(3);
      case '}':
        return push_container(WeightsNode::Kind::kDictionary);
      case 's':
        return set_one_item();
      case 'u': {
        TESSERA_ASSIGN_OR_RETURN(std::vector<Value> items, pop_to_mark());
        return set_items(std::move(items));
      }
      case 'c':
        return push_name();
      case 0x93:
        return push_name_of_stack();
      case 'R':
      case 0x81:
        return call();  // REDUCE, NEWOBJ
      case 'b':
        return build();
      case 'Q':
        return push_storage();
      case 'q':
      case 'r': {
        TESSERA_ASSIGN_OR_RETURN(const std::uint64_t place, unsigned_of(code == 'q' ? 1 : 4));
        return put(place);
      }
      case 0x94:
        return put(memo_.size());  // MEMOIZE
      case 'h':
      case 'j': {
        TESSERA_ASSIGN_OR_RETURN(const std::uint64_t place, unsigned_of(code == 'h' ? 1 : 4));
        return get(place);
      }
      default:
        break;
    }
    constexpr std::string_view kDigits = "0123456789abcdef";
    return damaged(std::string("its pickle has the instruction 0x") + kDigits[code / 16] + kDigits[code % 16] +
                   ", which torch.save does not write");
  }

  std::string_view rest_;
  bool stopped_ = false;
  std::vector<Value> stack_;
  std::vector<std::size_t> marks_;
  std::map<std::uint64_t, Value> memo_;
  std::deque<Container> containers_;
  Tree tree_;
};

}  // namespace

absl::StatusOr<PickledWeights> read_weights_pickle(std::string_view pickle) { return Reader(pickle).run(); }

}  // namespace tessera
