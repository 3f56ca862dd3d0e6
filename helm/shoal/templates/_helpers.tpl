{{- define "shoal.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- /* RELEASE-shoal, or RELEASE where that says shoal already; short enough for -operator, and a name for a Service. */ -}}
{{- define "shoal.fullname" -}}
{{- $name := include "shoal.wantedName" . }}
{{- if not (regexMatch "^[a-z][a-z0-9-]*$" $name) }}
{{- fail (printf "no Service may be called %s-operator: a release's name begins with a letter and has no dots; choose another, or set fullnameOverride" $name) }}
{{- end }}
{{- $name }}
{{- end }}

{{- define "shoal.wantedName" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "shoal.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "shoal.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "shoal.operator" -}}
{{ include "shoal.fullname" . }}-operator
{{- end }}

{{- define "shoal.labels" -}}
app.kubernetes.io/name: {{ include "shoal.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /*
More labels or annotations, as a user gives them. One that the chart sets as well would be there twice, which no API
server takes: (dict "root" $ "path" "operator.podLabels" "more" .Values.operator.podLabels)
*/ -}}
{{- define "shoal.more" -}}
{{- $own := keys (include "shoal.labels" .root | fromYaml) | concat (list "app.kubernetes.io/component" "grafana_dashboard" "checksum/settings") }}
{{- range $name := keys .more | sortAlpha }}
{{- if has $name $own }}
{{- fail (printf "%s: %s is set by the chart itself; leave it out" $.path $name) }}
{{- end }}
{{- end }}
{{- toYaml .more }}
{{- end }}

{{- /* What the operator's pods are known by; these never change. */ -}}
{{- define "shoal.operatorLabels" -}}
app.kubernetes.io/name: {{ include "shoal.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "shoal.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "shoal.operator" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is needed when serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- /* An image: (dict "root" $ "image" .Values.images.agent) */ -}}
{{- define "shoal.image" -}}
{{- $name := .image.repository }}
{{- with .root.Values.images.registry }}{{ $name = printf "%s/%s" (trimSuffix "/" .) $name }}{{ end }}
{{- if .image.digest }}
{{- printf "%s@%s" $name .image.digest }}
{{- else }}
{{- printf "%s:%s" $name (default .root.Chart.AppVersion .image.tag) }}
{{- end }}
{{- end }}

{{- /* The operator's resources. A limit below a request, such as the default of it, is refused: no pod could be made. */ -}}
{{- define "shoal.resources" -}}
{{- $resources := .Values.operator.resources | default dict }}
{{- range $name, $limit := $resources.limits }}
{{- $request := get ($resources.requests | default dict) $name }}
{{- if and $request (lt (include "shoal.amount" $limit | float64) (include "shoal.amount" $request | float64)) }}
{{- fail (printf "operator.resources: the limit of %s, %v, is below the request, %v; lower requests.%s as well" $name $limit $request $name) }}
{{- end }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- /* A quantity, such as 512Mi, as a plain number. */ -}}
{{- define "shoal.amount" -}}
{{- $text := toString . }}
{{- $unit := regexFind "[A-Za-z]+$" $text }}
{{- $units := dict "" 1.0 "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 }}
{{- mulf (trimSuffix $unit $text | float64) (get $units $unit) }}
{{- end }}

{{- /* Refuses namespaces that would be ignored: who gives some does not want an operator of all of them. */ -}}
{{- define "shoal.refuseIgnored" -}}
{{- if and .Values.rbac.namespaces (not .Values.rbac.namespaced) }}
{{- fail "rbac.namespaces is given, and rbac.namespaced is false: the operator would have rights in all namespaces. Set rbac.namespaced to true, or leave rbac.namespaces out" }}
{{- end }}
{{- end }}

{{- /* The namespaces that a namespaced operator sees, as JSON. */ -}}
{{- define "shoal.namespaces" -}}
{{- default (list .Release.Namespace) .Values.rbac.namespaces | uniq | toJson }}
{{- end }}

{{- /* The namespaces that this operator sees, or a star. */ -}}
{{- define "shoal.sees" -}}
{{- if .Values.rbac.namespaced }}{{ include "shoal.namespaces" . | fromJsonArray | join "," }}{{ else }}*{{ end }}
{{- end }}

{{- /*
Refuses a release that would see what another sees: each has a Lease in its own namespace, so both would lead, and
undo each other's work. And one whose ClusterRole would be called as another's. Only a cluster can say so: `helm template` knows of no other releases.
*/ -}}
{{- define "shoal.refuseAnother" -}}
{{- $mine := splitList "," (include "shoal.sees" .) }}
{{- range (lookup "rbac.authorization.k8s.io/v1" "ClusterRole" "" "").items }}
{{- $notes := .metadata.annotations | default dict }}
{{- $theirs := splitList "," (get $notes "shoal.dev/namespaces") }}
{{- $release := get $notes "meta.helm.sh/release-name" }}
{{- $home := get $notes "meta.helm.sh/release-namespace" }}
{{- if and $release (eq .metadata.name (include "shoal.operator" $)) (ne $home $.Release.Namespace) }}
{{- fail (printf "release %s in namespace %s has the name of this one's ClusterRole, %s: choose another name for this release, or fullnameOverride" $release $home .metadata.name) }}
{{- end }}
{{- if and (hasKey (.metadata.labels | default dict) "shoal.dev/sees") (or (ne $release $.Release.Name) (ne $home $.Release.Namespace)) }}
{{- range $mine }}
{{- if or (eq . "*") (has "*" $theirs) (has . $theirs) }}
{{- fail (printf "release %s in namespace %s sees %s already, and this one would too: two operators would undo each other's work. Uninstall that one, or give both namespaces of their own with rbac.namespaced and rbac.namespaces" $release $home (has "*" $theirs | ternary "all namespaces" (eq . "*" | ternary (join ", " $theirs) .))) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "shoal.hasPrometheus" -}}
{{- if .Capabilities.APIVersions.Has "monitoring.coreos.com/v1" }}true{{ end }}
{{- end }}

{{- /* Those of the groups that only some clusters have which this one has, as JSON. */ -}}
{{- define "shoal.otherGroups" -}}
{{- $found := list }}
{{- range list "cert-manager.io" "monitoring.coreos.com" }}
{{- if $.Capabilities.APIVersions.Has (printf "%s/v1" .) }}{{ $found = append $found . }}{{ end }}
{{- end }}
{{- $found | toJson }}
{{- end }}

{{- /* What Pod Security's restricted level asks of a container. */ -}}
{{- define "shoal.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* Where pods may run, as JSON: (dict "of" .Values.worker) */ -}}
{{- define "shoal.place" -}}
{{- dict "nodeSelector" (.of.nodeSelector | default dict) "tolerations" (.of.tolerations | default list) "affinity" (.of.affinity | default dict) "priorityClassName" (.of.priorityClassName | default "") | toJson }}
{{- end }}

{{- /*
More labels of the pods that the operator creates, as JSON: (dict "root" $ "of" "agent"). Its own win, so one of the same
name would be ignored.
*/ -}}
{{- define "shoal.podLabels" -}}
{{- $more := (get .root.Values .of).podLabels | default dict }}
{{- range $name := keys $more | sortAlpha }}
{{- if or (regexMatch "^app\\.kubernetes\\.io/(name|part-of|managed-by|instance|component)$" $name) (regexMatch "^([^/]*[.])?shoal\\.dev/" $name) }}
{{- fail (printf "%s.podLabels: %s is set by the operator itself; leave it out" $.of $name) }}
{{- end }}
{{- end }}
{{- $more | toJson }}
{{- end }}

{{- /* OperatorSettings, as the operator reads them. */ -}}
{{- define "shoal.settings" -}}
images:
  coordinator: {{ include "shoal.image" (dict "root" . "image" .Values.images.coordinator) }}
  worker: {{ include "shoal.image" (dict "root" . "image" .Values.images.worker) }}
  agent: {{ include "shoal.image" (dict "root" . "image" .Values.images.agent) }}
  pullPolicy: {{ .Values.images.pullPolicy }}
  pullSecrets: {{ .Values.images.pullSecrets | default list | toJson }}
namespace: {{ .Release.Namespace | quote }}
operatorLabels:
  {{- include "shoal.operatorLabels" . | nindent 2 }}
enrolment: {{ include "shoal.operator" . }}.{{ .Release.Namespace }}.svc:8443
agentFloor: {{ .Values.agent.floor }}
agentPriorityClass: {{ .Values.agent.priorityClassName | default "" | quote }}
agentLabels: {{ include "shoal.podLabels" (dict "root" . "of" "agent") }}
coordinatorMemory: {{ .Values.coordinator.memory }}
workerMemory: {{ .Values.worker.memory }}
workerDisk: {{ .Values.worker.disk }}
coordinatorPlace: {{ include "shoal.place" (dict "of" .Values.coordinator) }}
coordinatorLabels: {{ include "shoal.podLabels" (dict "root" . "of" "coordinator") }}
workerPlace: {{ include "shoal.place" (dict "of" .Values.worker) }}
workerLabels: {{ include "shoal.podLabels" (dict "root" . "of" "worker") }}
certManager: {{ .Values.certManager.enabled }}
podMonitors: {{ and .Values.podMonitor.enabled (eq (include "shoal.hasPrometheus" .) "true") }}
monitorLabels: {{ .Values.podMonitor.additionalLabels | default dict | toJson }}
monitorInterval: {{ .Values.podMonitor.interval | default "" | quote }}
networkPolicies: {{ .Values.networkPolicies.enabled }}
metricsFrom: {{ .Values.networkPolicies.metricsFrom | default list | toJson }}
offline: {{ .Values.offline }}
otherGroups: {{ include "shoal.otherGroups" . }}
{{- end }}
