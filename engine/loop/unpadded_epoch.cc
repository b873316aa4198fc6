#include "tessera/unpadded_epoch.h"

namespace tessera {
namespace {

thread_local int living = 0;

}  // namespace

UnpaddedEpoch::UnpaddedEpoch() { ++living; }
UnpaddedEpoch::~UnpaddedEpoch() { --living; }
bool UnpaddedEpoch::lives() { return living > 0; }

}  // namespace tessera
