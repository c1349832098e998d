// The members and lineages of an ElasticWorld, by number.
#pragma once

#include "elastic/view.h"

namespace torchft_ext {

inline MemberId idOfMember(int i) {
  MemberId id;
  id.bytes[0] = static_cast<uint8_t>((i + 1) >> 8);
  id.bytes[1] = static_cast<uint8_t>(i + 1);
  return id;
}

inline int indexOfMember(const MemberId& id) {
  return (id.bytes[0] << 8) + id.bytes[1] - 1;
}

using LineageNumber = int;  // 1: the first; of who goes on alone: its own number and 2

inline LineageNumber numberOf(const Lineage& lineage) {
  return lineage.bytes[0];
}

}  // namespace torchft_ext
