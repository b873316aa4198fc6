#include "sharding/compress/gradient_method.h"

namespace tessera {
namespace {

MadeMethod make_method(const NoMethodConfig&, const MethodSite&) { return std::unique_ptr<GradientMethod>(); }

}  // namespace

MadeMethod make_method(const CommHookConfig&, const MethodSite&) { return std::unique_ptr<GradientMethod>(); }

MadeMethod make_gradient_method(const CompressionMethod& method, const MethodSite& at) {
  return std::visit([&](const auto& each) { return make_method(each, at); }, method);
}

}  // namespace tessera
