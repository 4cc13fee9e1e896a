/* All-gathers between the devices of a host's ranks: by the devices' copies, through
 * memory exported by the ranks to each other.
 *
 * Each member has two *halves* of device memory, and two streams.  One operation is a
 * number of rounds, each of at most smp_exchange_half() bytes of every member's tensor:
 *
 *     own stream "fill"    tensor -> own half            | event filled[half]
 *     own stream "drain"   others' halves -> their places | event read[half]
 *
 * Round k uses half k % 2, counted over all operations.  fill waits for all others'
 * read[half] of round k - 2, drain for their filled[half] of round k, both on the
 * device. The host only has to order the calls: a wait for an event comes after the
 * call of its record, and before the next record's.  A wait means the last record at
 * the time of its call.  Common steps of all members do it: a member goes from fill()
 * of round k to drain() of round k when all have come back from fill() of round k
 * (comm/collective/intra_host/epoch_barrier.h).
 *
 *   - drain(k) waits for filled[half] of round k: fill(k) of all has returned.  None
 *     has begun fill(k + 2), since it comes after step k + 1, and this member comes
 *     there only after its drain(k).
 *   - fill(k) waits for read[half] of round k - 2: all have been through drain(k - 2),
 *     before step k - 1, and this member has passed that step.  None has begun
 *     drain(k), since it comes after this member's fill(k).
 *
 * Tensors in allocations opened by all other members (allocations.h) need no halves.
 * One such operation, all on the stream "drain":
 *
 *     show()        waits for the tensor's writers        | event ready
 *     read()        others' tensors -> their places       | event taken
 *     take_back()   waits for the others' copies          | the mark's end
 *
 * All members come back from show() before one begins read(), and from read() before
 * one begins take_back(): two of the common steps, with the vote on new allocations
 * perhaps between.  The steps of the next operation, of either kind, come after them.
 *
 *   - read(j) waits for ready of operation j: show(j) of all has returned.  None has
 *     begun show(j + 1), since it comes after the step before take_back(j), and this
 *     member posts that step only after its read(j).
 *   - take_back(j) waits for taken of operation j: read(j) of all has returned.  None
 *     has begun read(j + 1), since it comes after show(j + 1) of all, and this member
 *     comes there only after its take_back(j).
 *
 * On the device, too, an event's next record comes after the waits for this one: ready
 * of j + 1 behind the others' taken of j, on one stream.  These operations use no half,
 * no filled and no read, and do not count as rounds.
 *
 * So an awaited event has always been given to the other device before, and host
 * threads wait for each other's calls alone: no wait is in a circle.  (The streams of
 * one rank have the order of its operations, the same on all.)
 *
 * Before the first operation the members gather patterns, in SMP_TRIAL_ROUNDS rounds
 * like those above and one operation without halves, and each checks the arrived ones.
 *
 * Status     The halves were run by ranks on one shared H100, not yet between two GPUs.
 *            Tensors read where they lie were not yet run on a GPU.  The tests have a
 *            stand-in for the driver (tests/core/stand_in.c).  Between hosts there is
 *            no path of this kind: an all-gather of GPUs goes through NCCL there.
 * Ownership  Tensors are borrowed until the end of the operation's mark.
 * Threads    mark, begin, join, is_over, put_mark: one at a time, beside the others;
 *            these one at a time, too.
 * Errors     False, with `why` in the driver's words.  After a failure of fill, drain,
 *            finish, show, read or take_back the device's further work is unknown: its
 *            marks are never over.  In a forked child nothing is done.
 */
#ifndef SMP_COMM_DEVICE_EXCHANGE_H
#define SMP_COMM_DEVICE_EXCHANGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/device/allocations.h"
#include "comm/memory/user.h"
#include "device/driver.h"

typedef struct smp_exchange smp_exchange;

/* A member's card for the others, opaque but for bytes. */
typedef struct {
    uint64_t          bytes; /* of a half */
    uint64_t          seed;  /* of the member's pattern (common/pattern.h) */
    uint64_t          owner; /* smp_allocations_owner() */
    uint64_t          base;  /* of the halves; the owner's address */
    smp_driver_handle memory;
    smp_driver_handle filled[2];
    smp_driver_handle read[2];
    smp_driver_handle ready;
    smp_driver_handle taken;
} smp_exchange_card;

/* A member's input in an operation without halves, for the others. */
typedef struct {
    smp_export_state state;
    uint64_t         gone[SMP_GONE]; /* of its allocations: smp_exports_find() */
    uint64_t         offset;
    smp_allocation   allocation; /* identity 0: of no bytes */
} smp_exchange_input;

/* An operation's place in the time of its caller's stream. */
typedef struct smp_device_mark {
    void                   *begin; /* owned: from here on its tensors may be used */
    void                   *end;   /* owned: from here on they are the caller's again */
    struct smp_device_mark *next;  /* of the free ones */
    struct smp_device_mark *every; /* of all */
} smp_device_mark;

/* One operation; addresses are the device's. */
typedef struct {
    const smp_device_mark *mark; /* borrowed, like the tensors, until it is over */
    uint64_t               in;
    const uint64_t        *outs; /* [size]: where each member's tensor goes */
} smp_device_gather;

/* The offer of a member's device. */
typedef struct {
    int    number; /* the device's */
    size_t bytes;  /* of memory, for two halves; 0: none */
} smp_device_offer;

/* Memory of two halves, together `bytes` or a little less, on device `number`, for
 * `self` of `size` members.  NULL: no. */
smp_exchange *smp_exchange_create(int number, size_t bytes, int size, int self,
                                  smp_exchange_card *card, char why[SMP_DRIVER_TEXT]);

/* Opens the others' memory: cards[size].  Halves are as large as the smallest.
 */
bool smp_exchange_open(smp_exchange *exchange, const smp_exchange_card *cards,
                       char why[SMP_DRIVER_TEXT]);

/* Rounds of the trial: each half is filled, and one of them again. */
#define SMP_TRIAL_ROUNDS 3

/* After open(), on all members, for each round of the trial: as fill() and drain() in
 * an operation's. */
bool smp_exchange_try_fill(smp_exchange *exchange, int round,
                           char why[SMP_DRIVER_TEXT]);
bool smp_exchange_try_drain(smp_exchange *exchange, int round,
                            char why[SMP_DRIVER_TEXT]);

/* Then as show() and read() in an operation without halves. */
bool smp_exchange_try_show(smp_exchange *exchange, smp_exchange_input *own,
                           char why[SMP_DRIVER_TEXT]);
bool smp_exchange_try_read(smp_exchange *exchange, char why[SMP_DRIVER_TEXT]);

/* Whether all patterns have arrived, after the last read; waits for them, 10 s at most.
 */
bool smp_exchange_tried(smp_exchange *exchange, char why[SMP_DRIVER_TEXT]);

/* Waits (for a second at most) for the copies under way.  False: they do not end. */
bool smp_exchange_rest(const smp_exchange *exchange);

/* Closes the others' memory, when no stream of the core has work (device/streams.h);
 * waits for that for a second at most.  False: it stays open. */
bool smp_exchange_close(smp_exchange *exchange);

/* Takes it, after close, and readers[0 .. n) with their references.  Its memory is
 * freed when no reader has it open any more: now, or when another of this process is
 * retired or made; the end of the process frees it in any case.  It alone does so after
 * the death of a reader with a process invisible from here.  With `leave` it is left to
 * the process's end. */
void smp_exchange_retire(smp_exchange *exchange, smp_user *readers, int n, bool leave);

int    smp_exchange_device(const smp_exchange *exchange); /* its number */
size_t smp_exchange_half(const smp_exchange *exchange);   /* bytes */

/* Fills this member's half of the present round with bytes [skip .. skip + bytes) of
 * the operation's tensor.  May be done again before the round's drain(). */
bool smp_exchange_fill(smp_exchange *exchange, const smp_device_gather *gather,
                       size_t skip, size_t bytes, char why[SMP_DRIVER_TEXT]);

/* Copies the others' filled halves, and the own part, to their places: bytes[m] of
 * member m, to skip bytes behind the beginning of its output.  Ends the round. */
bool smp_exchange_drain(smp_exchange *exchange, const smp_device_gather *gather,
                        size_t skip, const size_t *bytes, char why[SMP_DRIVER_TEXT]);

/* No round of the operation follows: its mark ends behind all begun work. */
bool smp_exchange_finish(smp_exchange *exchange, const smp_device_gather *gather,
                         char why[SMP_DRIVER_TEXT]);

/* An operation without halves: this member's input is for the others to read, behind
 * its mark's begin, or *own says that it cannot be read. */
bool smp_exchange_show(smp_exchange *exchange, const smp_device_gather *gather,
                       size_t bytes, smp_exchange_input *own,
                       char why[SMP_DRIVER_TEXT]);

/* Closes the allocations that an input names as gone. */
void smp_exchange_drop_gone(smp_exchange *exchange, int member,
                            const smp_exchange_input *input);

/* Has a member's input open for read(), if it is not CLOSED. */
bool smp_exchange_open_input(smp_exchange *exchange, int member,
                             const smp_exchange_input *input,
                             char                      why[SMP_DRIVER_TEXT]);

/* The vote on the shown input: CLOSED or OPEN from now on. */
void smp_exchange_settle(smp_exchange *exchange, smp_export_state state);

/* Copies the open inputs, bytes[m] of member m, to their places. */
bool smp_exchange_read(smp_exchange *exchange, const smp_device_gather *gather,
                       const size_t *bytes, char why[SMP_DRIVER_TEXT]);

/* The operation's mark ends behind the others' copies. */
bool smp_exchange_take_back(smp_exchange *exchange, const smp_device_gather *gather,
                            char why[SMP_DRIVER_TEXT]);

/* A mark of the exchange's; it goes back by put_mark and ends with the exchange.  NULL:
 * none. */
smp_device_mark *smp_exchange_mark(smp_exchange *exchange, char why[SMP_DRIVER_TEXT]);
void             smp_exchange_put_mark(smp_exchange *exchange, smp_device_mark *mark);

/* The tensors are ready behind the work given to `stream` so far. */
bool smp_exchange_begin(const smp_exchange *exchange, const smp_device_mark *mark,
                        void *stream, char why[SMP_DRIVER_TEXT]);

/* Later work of `stream` comes after the operation.  The host's part of it is over. */
bool smp_exchange_join(const smp_exchange *exchange, const smp_device_mark *mark,
                       void *stream, char why[SMP_DRIVER_TEXT]);

/* Whether the device has done the operation.  The host's part of it is over. */
bool smp_exchange_is_over(const smp_exchange *exchange, const smp_device_mark *mark);

#endif
