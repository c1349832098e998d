#include "base/member_incarnation.h"

#include <algorithm>

namespace torchft_ext {

Incarnation newMemberIncarnation() {
  Incarnation fresh = Incarnation::random();
  const ProcessPart process = processPartOf(selfIncarnation());
  std::copy(process.begin(), process.end(), fresh.bytes.begin());
  return fresh;
}

ProcessPart processPartOf(const Incarnation& incarnation) {
  ProcessPart part{};
  std::copy_n(incarnation.bytes.begin(), part.size(), part.begin());
  return part;
}

}  // namespace torchft_ext
