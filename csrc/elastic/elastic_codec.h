// How the values of elastic/view.h and elastic/elastic_message.h stand in bytes. Reading is total
// and bounded: nothing is allocated from a count before as many bytes are there. Pure functions.
#pragma once

#include "elastic/elastic_message.h"
#include "elastic/view.h"
#include "net/frame.h"

namespace torchft_ext {

void write(ByteWriter& writer, const Member& member);
Member readMember(ByteReader& reader);
void write(ByteWriter& writer, const View& view);
View readView(ByteReader& reader);
void write(ByteWriter& writer, const AcceptedView& accepted);
AcceptedView readAccepted(ByteReader& reader);

}  // namespace torchft_ext
