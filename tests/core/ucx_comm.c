/* The list of tests for transports, over UCX, and what is particular to UCX: ucx_comm
 * [name].  Spec: csrc/comm/transport/ucx. */
#define _GNU_SOURCE
#include "comm/transport/connecting/lifeline.h"
#include "comm/transport/connecting/meet.h"
#include "comm/transport/ucx/am.h"
#include "comm/transport/ucx/devices.h"
#include "comm/transport/ucx/introduction.h"
#include "comm/transport/ucx/library.h"
#include "comm_list.h"
#include "common/log.h"
#include "common/pattern.h"
#include "deaths.h"
#include "hosts_list.h"
#include "partings.h"

/* --------------------------------------------------------------------- the trial */

/* Of all ranks of a test: patterns that are taken for wrong, whatever they are. */
static _Atomic int *wrong_patterns;

bool __real_smp_pattern_is(const void *from, size_t bytes, uint64_t seed);
bool __wrap_smp_pattern_is(const void *from, size_t bytes, uint64_t seed);

bool
__wrap_smp_pattern_is(const void *from, size_t bytes, uint64_t seed)
{
    return (wrong_patterns == NULL || atomic_fetch_sub(wrong_patterns, 1) <= 0) &&
           __real_smp_pattern_is(from, bytes, seed);
}

/* One of three ranks has found a pattern wrong: it and its peer, which has not, talk
 * over TCP, the others over UCX; nothing is lost. */
TEST_RANK(both_ranks_of_a_pair_come_to_the_same_transport, .processes = "")
{
    static const size_t sizes[] = {100, 300000};
    char                text[SMP_WARNING_BYTES];
    smp_message        *message;

    for (int i = 0; i < w->size - 1; i++) {
        const char *by = smp_comm_transport(w->comm, other(w, i));

        CHECK(strcmp(by, "ucx") == 0 || strcmp(by, "tcp") == 0);
        atomic_fetch_add(&w->shared->scratch[0], strcmp(by, "tcp") == 0);
        CHECK_OK(send_filled(w, other(w, i), (uint64_t)w->rank, 50, sizes, 2));
    }
    for (int i = 0; i < w->size - 1; i++) {
        CHECK_OK(smp_comm_receive(w->comm, WORLD_DEADLINE_NS, &message));
        CHECK(message_filled(message, (uint64_t)message->source, 50, sizes, 2));
        smp_message_free(message);
    }
    if (smp_warning_take(text)) {
        CHECK_HAS(text, "over UCX, which was tried");
        CHECK_HAS(text, "other bytes than");
        atomic_fetch_add(&w->shared->scratch[1], 1);
    }
    w->barrier(w);
    CHECK(atomic_load(&w->shared->scratch[0]) == 2);
    CHECK(atomic_load(&w->shared->scratch[1]) == 1);
    w->barrier(w);
}

TEST(a_pair_whose_trial_fails_talks_over_the_next_transport)
{
    bool failed;

    wrong_patterns = mmap(NULL, sizeof(*wrong_patterns), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(wrong_patterns != MAP_FAILED);
    atomic_store(wrong_patterns, 1);
    failed = world_run_processes(&world_both_ranks_of_a_pair_come_to_the_same_transport,
                                 "ucx,tcp", 3);
    munmap(wrong_patterns, sizeof(*wrong_patterns));
    wrong_patterns = NULL;
    CHECK(!failed);
}

/* ------------------------------------------------------------------ its devices */

TEST(without_being_named_it_serves_only_devices_that_tcp_does_not)
{
    smp_comm_config config = {.size = 2, .pool_bytes = 1 << 20, .job = "job"};
    smp_comm       *comm;
    const void     *card;
    size_t          bytes;

    CHECK_OK(smp_comm_create(&config, &comm));
    card = smp_comm_card(comm, &bytes);
    CHECK((smp_card_find(card, "ucx", &bytes) != NULL) == smp_ucx_fast_devices());
    CHECK(smp_card_find(card, "tcp", &bytes) != NULL);
    smp_comm_destroy(comm);
    config.transports = "ucx";
    CHECK_OK(smp_comm_create(&config, &comm));
    CHECK(smp_card_find(smp_comm_card(comm, &bytes), "ucx", &bytes) != NULL);
    smp_comm_destroy(comm);
}

/* ------------------------------------------------------------------- an impostor */

/* A rank 0 that is one, and a rank 1 that says whatever a test makes it say. */
typedef struct {
    smp_comm   *comm; /* rank 0's */
    const void *cards[2];
    size_t      card_bytes[2];
    _Alignas(8) uint8_t card[SMP_CARD_BYTES];
    int            timeout_ms;
    int            failed;
    smp_status     status; /* of its connect */
    pthread_t      thread;
    _Atomic bool   connected; /* connect has returned */
    const smp_ucp *ucp;
    ucp_context   *context;
    ucp_worker    *worker;
    ucp_ep        *ep;
    int            fd; /* the lifeline */
    uint64_t       pass;
} impostor;

static void *
connect_main(void *arg)
{
    impostor *im = arg;

    im->status = smp_comm_connect(im->comm, im->cards, im->card_bytes,
                                  PATIENCE_MS(im->timeout_ms), &im->failed);
    atomic_store(&im->connected, true);
    return NULL;
}

static void
on_fetched(void *request, ucs_code code, size_t length, void *arg)
{
    impostor *im = arg;

    (void)code;
    (void)length;
    im->ucp->ucp_request_free(request);
}

/* It takes what it is sent, and looks at nothing. */
static ucs_code
take(void *arg, const void *header, size_t header_bytes, void *data, size_t n,
     const ucp_am_recv_param *param)
{
    static uint8_t    room[SMP_UCX_TRY_BLOCK_BYTES];
    impostor         *im = arg;
    ucp_request_param how = {.op_attr_mask = SMP_UCP_OP_ATTR_FIELD_CALLBACK |
                                             SMP_UCP_OP_ATTR_FIELD_USER_DATA,
                             .cb.recv_am = on_fetched,
                             .user_data = im};

    (void)header;
    (void)header_bytes;
    if ((param->recv_attr & SMP_UCP_AM_RECV_ATTR_FLAG_RNDV) != 0 && n <= sizeof(room)) {
        (void)im->ucp->ucp_am_recv_data_nbx(im->worker, data, room, n, &how);
    }
    return SMP_UCS_OK;
}

static void
open_impostors_ucx(impostor *im)
{
    const ucp_am_handler_param handler = {.field_mask =
                                              SMP_UCP_AM_HANDLER_PARAM_FIELD_ID |
                                              SMP_UCP_AM_HANDLER_PARAM_FIELD_CB |
                                              SMP_UCP_AM_HANDLER_PARAM_FIELD_ARG,
                                          .id = SMP_UCX_AM_ID,
                                          .cb = take,
                                          .arg = im};
    const ucp_params           params = {.field_mask = SMP_UCP_PARAM_FIELD_FEATURES,
                                         .features = SMP_UCP_FEATURE_AM};
    ucp_worker_params          worker = {.field_mask = 0};
    ucp_config                *config;

    CHECK_OK(smp_ucx_library(&im->ucp));
    CHECK(im->ucp->ucp_config_read(NULL, NULL, &config) == SMP_UCS_OK);
    CHECK(im->ucp->ucp_config_modify(config, "TLS", "^shm") == SMP_UCS_OK);
    CHECK(im->ucp->ucp_init_version(SMP_UCP_MAJOR, SMP_UCP_MINOR, &params, config,
                                    &im->context) == SMP_UCS_OK);
    im->ucp->ucp_config_release(config);
    CHECK(im->ucp->ucp_worker_create(im->context, &worker, &im->worker) == SMP_UCS_OK);
    CHECK(im->ucp->ucp_worker_set_am_recv_handler(im->worker, &handler) == SMP_UCS_OK);
}

/* Rank 1's side of the meeting, up to where it would say hello. */
static void
introduce_impostor(impostor *im)
{
    ucp_worker_attr attr = {.field_mask = SMP_UCP_WORKER_ATTR_FIELD_ADDRESS};
    ucp_ep_params   params = {.field_mask = SMP_UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                            SMP_UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
                              .err_mode = SMP_UCP_ERR_HANDLING_MODE_PEER};
    void           *theirs;

    open_impostors_ucx(im);
    CHECK(im->ucp->ucp_worker_query(im->worker, &attr) == SMP_UCS_OK);
    CHECK(smp_ucx_introduce(im->fd, 77, attr.address, attr.address_length));
    im->ucp->ucp_worker_release_address(im->worker, attr.address);
    CHECK_OK(smp_ucx_be_introduced(im->fd, PATIENCE_MS(60000), &im->pass, &theirs));
    params.address = theirs;
    CHECK(im->ucp->ucp_ep_create(im->worker, &params, &im->ep) == SMP_UCS_OK);
    free(theirs);
}

static void
make_impostor(impostor *im, int timeout_ms)
{
    smp_comm_config config = {
        .size = 2, .pool_bytes = 1 << 20, .transports = "ucx", .job = "job"};
    smp_card           *card = (smp_card *)(void *)im->card;
    char                secret[SMP_LIFELINE_SECRET];
    smp_tcp_self        self = {.rank = 1, .size = 2, .job = secret};
    const smp_tcp_card *cards[2] = {NULL, NULL};
    bool                wanted[2] = {true, false};
    bool                met[2] = {false, false};
    int                 fds[2];
    smp_tcp_door        door;
    size_t              bytes;

    im->timeout_ms = timeout_ms;
    smp_lifeline_secret("job", "ucx", secret);
    CHECK_OK(smp_comm_create(&config, &im->comm));
    CHECK_OK(smp_tcp_door_open(1, NULL, &door));
    smp_card_begin(card, 1, 2);
    CHECK(smp_card_add(card, "ucx", &door.card, sizeof(door.card)));
    im->cards[0] = smp_comm_card(im->comm, &im->card_bytes[0]);
    im->cards[1] = card;
    im->card_bytes[1] = card->bytes;
    cards[0] = smp_card_find(im->cards[0], "ucx", &bytes);
    CHECK(pthread_create(&im->thread, NULL, connect_main, im) == 0);
    CHECK_OK(smp_tcp_meet(&door, &self, cards, wanted, PATIENCE_MS(20000), fds, met));
    CHECK(met[0]);
    im->fd = fds[0];
    introduce_impostor(im);
}

/* Sends one active message and waits until it is gone, or rank 0 has given us up. */
static void
say(impostor *im, smp_ucx_am head, size_t head_bytes, const void *data, size_t n)
{
    ucp_request_param how = {0};
    ucs_code_ptr      sent = im->ucp->ucp_am_send_nbx(im->ep, SMP_UCX_AM_ID, &head,
                                                      head_bytes, data, n, &how);

    CHECK(!smp_ucs_is_error(sent));
    while (sent != NULL &&
           im->ucp->ucp_request_check_status(sent) == SMP_UCS_INPROGRESS) {
        im->ucp->ucp_worker_progress(im->worker);
        if (atomic_load(&im->connected) && im->status != SMP_OK) {
            break;
        }
    }
    if (sent != NULL) {
        im->ucp->ucp_request_free(sent);
    }
}

static smp_ucx_am
head_of(const impostor *im, smp_ucx_am_kind kind, uint64_t number, uint64_t nbytes)
{
    return (smp_ucx_am){.pass = im->pass,
                        .kind = (uint32_t)kind,
                        .from = 1,
                        .number = number,
                        .first = nbytes};
}

static void
say_plainly(impostor *im, smp_ucx_am head, const void *data, size_t n)
{
    say(im, head, sizeof(head), data, n);
}

/* Rank 0's connect comes to its end. */
static void
end_connect(impostor *im, smp_status want)
{
    while (!atomic_load(&im->connected)) {
        im->ucp->ucp_worker_progress(im->worker);
        sched_yield();
    }
    pthread_join(im->thread, NULL);
    CHECK_STATUS(im->status, want);
}

/* The pattern that travels as a head does, and the one that travels as a block; with
 * `spoil`, another byte in the middle. */
static void
say_pattern(impostor *im, smp_ucx_am_kind kind, bool spoil)
{
    static uint8_t pattern[SMP_UCX_TRY_BLOCK_BYTES];
    bool           large = kind == SMP_UCX_AM_TRY_BLOCK;
    size_t         n = large ? SMP_UCX_TRY_BLOCK_BYTES : SMP_UCX_TRY_HEAD_BYTES;

    smp_pattern_write(pattern, n, large ? ~im->pass : im->pass);
    pattern[n / 2] ^= spoil;
    say_plainly(im, head_of(im, kind, 0, 0), pattern, n);
}

static void
be_met(impostor *im)
{
    make_impostor(im, 60000);
    say_plainly(im, head_of(im, SMP_UCX_AM_HELLO, 0, 0), NULL, 0);
    say_pattern(im, SMP_UCX_AM_TRY_BLOCK, false);
    say_pattern(im, SMP_UCX_AM_TRY_HEAD, false);
    CHECK(smp_lifeline_say(im->fd, SMP_UCX_AGREED));
    end_connect(im, SMP_OK);
}

static void
drop_impostor(impostor *im)
{
    const ucp_request_param force = {.op_attr_mask = SMP_UCP_OP_ATTR_FIELD_FLAGS,
                                     .flags = SMP_UCP_EP_CLOSE_FLAG_FORCE};
    ucs_code_ptr            closing;

    close(im->fd);
    smp_comm_destroy(im->comm);
    closing = im->ucp->ucp_ep_close_nbx(im->ep, &force);
    if (closing != NULL && !smp_ucs_is_error(closing)) {
        while (im->ucp->ucp_request_check_status(closing) == SMP_UCS_INPROGRESS) {
            im->ucp->ucp_worker_progress(im->worker);
        }
        im->ucp->ucp_request_free(closing);
    }
    im->ucp->ucp_worker_destroy(im->worker);
    im->ucp->ucp_cleanup(im->context);
}

TEST(who_does_not_know_the_pass_is_not_reached)
{
    impostor   im = {.fd = -1};
    smp_ucx_am wrong;

    make_impostor(&im, 1000);
    wrong = head_of(&im, SMP_UCX_AM_HELLO, 0, 0);
    wrong.pass ^= 1;
    say_plainly(&im, wrong, NULL, 0);
    CHECK(smp_lifeline_say(im.fd, SMP_UCX_AGREED));
    end_connect(&im, SMP_ERR_UNREACHABLE);
    CHECK(im.failed == 1);
    drop_impostor(&im);
}

/* One who says of himself that all is well is not reached, and rank 0 warns. */
static void
fails_its_trial(int timeout_ms, bool spoil_head, bool spoil_block, bool leave_out,
                const char *how)
{
    impostor im = {.fd = -1};
    char     text[SMP_WARNING_BYTES];

    make_impostor(&im, timeout_ms);
    say_plainly(&im, head_of(&im, SMP_UCX_AM_HELLO, 0, 0), NULL, 0);
    CHECK(smp_lifeline_say(im.fd, SMP_UCX_AGREED));
    if (!leave_out) {
        say_pattern(&im, SMP_UCX_AM_TRY_BLOCK, spoil_block);
    }
    say_pattern(&im, SMP_UCX_AM_TRY_HEAD, spoil_head);
    end_connect(&im, SMP_ERR_UNREACHABLE);
    CHECK(im.failed == 1);
    CHECK(smp_warning_take(text));
    CHECK_HAS(text, "rank 0 does not talk to rank 1 over UCX");
    CHECK_HAS(text, how);
    CHECK(!smp_warning_take(text));
    drop_impostor(&im);
}

TEST(who_sends_other_bytes_is_not_reached)
{
    fails_its_trial(60000, true, false, false, "other bytes than");
    fails_its_trial(60000, false, true, false, "other bytes than");
}

TEST(who_does_not_send_all_patterns_is_not_reached)
{
    fails_its_trial(4000, false, false, true, "did not arrive in time");
}

TEST(messages_without_the_pass_are_dropped)
{
    impostor     im = {.fd = -1};
    smp_ucx_am   head;
    smp_message *message;

    be_met(&im);
    head = head_of(&im, SMP_UCX_AM_HEAD, 0, 8);
    head.pass ^= (uint64_t)1 << 63;
    say_plainly(&im, head, "no pass.", 8);
    head = head_of(&im, SMP_UCX_AM_GOODBYE, 0, 0);
    head.pass = 0;
    say_plainly(&im, head, NULL, 0);
    head = head_of(&im, SMP_UCX_AM_HEAD, 0, 8);
    for (head.from = -1; head.from < 3; head.from += head.from == 0 ? 2 : 1) {
        say_plainly(&im, head, "another.", 8); /* -1, 0 and 2 */
    }
    head.from = 1;
    say(&im, head, sizeof(head) - 1, "too few.", 8);
    say_plainly(&im, head, "a rank's", 8);
    CHECK_OK(smp_comm_receive(im.comm, WORLD_DEADLINE_NS, &message));
    CHECK(message->nbytes == 8 && memcmp(message->bytes, "a rank's", 8) == 0);
    smp_message_free(message);
    CHECK_STATUS(smp_comm_receive(im.comm, 0, &message), SMP_ERR_TIMED_OUT);
    drop_impostor(&im);
}

/* Whether rank 0 takes it as malformed and hangs up. */
static void
breaks(smp_ucx_am_kind kind, uint64_t number, uint64_t nbytes, size_t n)
{
    static const uint8_t zeros[1 << 16];
    impostor             im = {.fd = -1};
    smp_message         *message;
    char                 what;

    be_met(&im);
    say_plainly(&im, head_of(&im, SMP_UCX_AM_HEAD, 0, 8), zeros, 8);
    CHECK_OK(smp_comm_receive(im.comm, WORLD_DEADLINE_NS, &message));
    smp_message_free(message);
    say_plainly(&im, head_of(&im, kind, number, nbytes), zeros, n);
    CHECK_STATUS(smp_comm_receive(im.comm, WORLD_DEADLINE_NS, &message),
                 SMP_ERR_MALFORMED);
    CHECK(smp_comm_lost(im.comm) == 1);
    CHECK_STATUS(smp_comm_send(im.comm, 1, "x", 1, NULL, 0), SMP_ERR_PEER_LOST);
    while (smp_lifeline_hear(im.fd, &what) != SMP_LIFELINE_HUNG_UP) {
        sched_yield();
    }
    drop_impostor(&im);
}

TEST(what_no_rank_says_is_malformed)
{
    breaks((smp_ucx_am_kind)99, 1, 0, 8);
    breaks(SMP_UCX_AM_HEAD, 0, 8, 8);  /* said before */
    breaks(SMP_UCX_AM_HEAD, 1, 16, 8); /* more than there is */
    breaks(SMP_UCX_AM_HEAD, 1, 8, 16);
    breaks(SMP_UCX_AM_BLOCK, 0, 0, 8);
    breaks(SMP_UCX_AM_TRY_HEAD, 0, 0, 8); /* tried before */
    breaks(SMP_UCX_AM_GOODBYE, 0, 0, 0);
}

TEST(a_lifeline_that_ends_without_goodbye_is_a_loss)
{
    impostor     im = {.fd = -1};
    smp_message *message;

    be_met(&im);
    shutdown(im.fd, SHUT_WR);
    CHECK_STATUS(smp_comm_receive(im.comm, WORLD_DEADLINE_NS, &message),
                 SMP_ERR_PEER_LOST);
    CHECK(smp_comm_lost(im.comm) == 1);
    drop_impostor(&im);
}

TEST(a_goodbye_is_answered_when_all_before_it_has_arrived)
{
    impostor     im = {.fd = -1};
    smp_message *message;
    char         what = 0;

    be_met(&im);
    say_plainly(&im, head_of(&im, SMP_UCX_AM_GOODBYE, 1, 0), NULL, 0);
    say_plainly(&im, head_of(&im, SMP_UCX_AM_HEAD, 0, 8), "the rest", 8);
    while (what != SMP_UCX_ARRIVED) {
        CHECK(smp_lifeline_hear(im.fd, &what) != SMP_LIFELINE_HUNG_UP);
        im.ucp->ucp_worker_progress(im.worker);
    }
    CHECK_OK(smp_comm_receive(im.comm, WORLD_DEADLINE_NS, &message));
    CHECK(memcmp(message->bytes, "the rest", 8) == 0);
    smp_message_free(message);
    CHECK_STATUS(smp_comm_receive(im.comm, WORLD_DEADLINE_NS, &message),
                 SMP_ERR_CLOSED);
    CHECK(smp_comm_lost(im.comm) == -1 && smp_comm_left(im.comm, 1));
    drop_impostor(&im);
}

/* ---------------------------------------------------------------------------- main */

/* Of ucx_abi.c. */
extern const char smp_ucx_abi_checked[];

/* This process forks, and loads UCX only after that.  Layouts of hosts are a matter of
 * the collectives, which run on all of them over TCP. */
int
main(int argc, char **argv)
{
    static const world_plan sizes = {.transports = "ucx",
                                     .by = WORLD_SIZES_ALONE,
                                     .processes = "24",
                                     .threads = "24",
                                     .once = true};
    static const world_plan layouts = {
        .transports = "shm,ucx", .by = WORLD_LAYOUTS_ALONE, .step = 3};

    run_worlds_as(argc, argv, &sizes, false);
    run_worlds_as(argc, argv, &layouts, false);
    run_tests(argc, argv);
    run_worlds_as(argc, argv, &sizes, true);
    run_worlds_as(argc, argv, &layouts, true);
    printf("%s; ", smp_ucx_abi_checked);
    return tests_are_over();
}
